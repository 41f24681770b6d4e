#!/bin/bash
# Build the pinned environment of an inference engine, once.
#
#   scripts/engines/install.sh sglang|vllm
#
# The place is $AGENT_RL_ENGINES_DIR, by default .venvs/ in the repository. The engines do not
# share an environment with the trainer or with each other: their pins contradict. A finished
# environment is left alone until its pin file changes.
set -euo pipefail
engine=${1:?usage: scripts/engines/install.sh sglang|vllm}
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/$engine.txt
[ -f "$pins" ] || { echo "no pins for engine '$engine': expected sglang or vllm" >&2; exit 2; }
target=${AGENT_RL_ENGINES_DIR:-$here/../../.venvs}/$engine
python=${AGENT_RL_ENGINES_PYTHON:-python3.11}
want=$(sha256sum "$pins" | cut -d' ' -f1)
mkdir -p "$(dirname "$target")"

# Two test runs may arrive together; the second waits and then finds the work done.
exec 9>"$target.lock"
flock 9
if [ "$(cat "$target/.pins" 2>/dev/null || true)" = "$want" ]; then
    echo "$target is up to date"
    exit 0
fi
rm -rf "$target"
"$python" -m venv "$target"
# --no-deps: the pin file is the whole closure; the packages' own metadata asks for CUDA builds.
"$target/bin/python" -m pip install -qq --no-deps --disable-pip-version-check -r "$pins"
echo "$want" > "$target/.pins"
echo "$target built"
