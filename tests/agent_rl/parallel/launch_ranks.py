"""Starting the ranks of one world, waiting for them, and what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from combinations import Combination
from forced_policy import ForcedPolicy
from parallel_data import make_samples, write_policy
from safetensors.torch import load_file, save_file

CHECKS = Path(__file__).with_name("rank_checks.py")
START_S, COMBINATION_S = 900, 120  # generous: ranks that fail are noticed at once

Results = dict[str, dict]  # what rank 0 wrote, by the name of the combination


class Launcher:
    """Runs combinations in ``folder``; the policies and their reference are made once.

    The reference is transformers' gradient and log-probs, and what one process without any
    parallelism makes of the same step: update, live routing, metrics, and the other modes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._policy = write_policy(folder / "policy")
        self._transparent = write_policy(folder / "transparent", transparent=True)
        self._reference = folder / "reference.safetensors"
        policy = ForcedPolicy(self._policy)
        samples = [sample for sample in make_samples() if len(sample.token_ids) > 1]
        found = {f"grad/{n}": g.contiguous() for n, g in policy.gradients(samples).items()}
        with torch.no_grad():
            found["logprobs"] = torch.cat([policy.logprobs(sample)[0] for sample in samples])
        save_file(found, self._reference)
        alone = Combination("alone", 1, {}, faults=True, modes=True)
        self.one_process = self.run([alone])[alone.name]
        save_file(found | load_file(f"{self._out(1)}.safetensors"), self._reference)

    def run(self, combinations: Sequence[Combination]) -> Results:
        """All of them take the same number of processes. Raises ``AssertionError`` with the
        ranks' errors when one of them fails or does not end in time."""
        if not combinations:
            return {}
        (processes,) = {combination.processes for combination in combinations}
        job = self._folder / f"job-{processes}.json"
        job.write_text(
            json.dumps(
                {
                    "policy": str(self._policy),
                    "transparent": str(self._transparent),
                    "reference": str(self._reference),
                    "combinations": [combination.settings() for combination in combinations],
                }
            )
        )
        deadline = time.monotonic() + START_S + COMBINATION_S * len(combinations)
        self._run_ranks(processes, [str(job), str(self._out(processes))], deadline)
        return json.loads(self._out(processes).read_text())

    def _out(self, processes: int) -> Path:
        return self._folder / f"results-{processes}.json"

    def _run_ranks(self, processes: int, arguments: list[str], deadline: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        logs = [self._folder / f"rank-{rank}.log" for rank in range(processes)]
        ranks = []
        for rank, log in enumerate(logs):
            place = {"RANK": str(rank), "WORLD_SIZE": str(processes)}
            with log.open("wb") as stream:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(CHECKS), *arguments],
                        env=os.environ | rendezvous | place,
                        stdout=stream,
                        stderr=stream,
                    )
                )
        try:
            while any(process.poll() is None for process in ranks):
                failed = any(process.poll() not in (None, 0) for process in ranks)
                assert not failed, self._errors(logs)
                assert time.monotonic() < deadline, self._errors(logs)
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        assert all(process.returncode == 0 for process in ranks), self._errors(logs)

    def _errors(self, logs: Sequence[Path]) -> str:
        time.sleep(1.0)  # the others' errors, caused by the first
        texts = [log.read_text(errors="replace")[-3000:] for log in logs]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(texts))
