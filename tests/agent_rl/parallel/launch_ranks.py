"""Starting the ranks of one world, waiting for them, and what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from combinations import Combination
from forced_policy import ForcedPolicy
from parallel_data import make_samples
from parallel_policies import write_policy
from safetensors.torch import load_file, save_file

CHECKS = Path(__file__).with_name("rank_checks.py")
START_S, COMBINATION_S = 900, 120  # generous: ranks that fail are noticed at once

Results = dict[str, dict]  # what rank 0 wrote, by the name of the combination


@dataclass(frozen=True)
class Policies:
    """The policies of one family, in ``folder``, and what their training should show.

    The reference is transformers' gradient and log-probs, and what one process without any
    parallelism makes of the same step: update, live routing, metrics, and the other modes.
    """

    folder: Path

    @property
    def reference(self) -> Path:
        return self.folder / "reference.safetensors"

    def write(self) -> None:
        policy = ForcedPolicy(write_policy(self.folder / "policy", self.folder.name))
        write_policy(self.folder / "transparent", self.folder.name, transparent=True)
        samples = [sample for sample in make_samples() if len(sample.token_ids) > 1]
        found = {f"grad/{n}": g.contiguous() for n, g in policy.gradients(samples).items()}
        with torch.no_grad():
            found["logprobs"] = torch.cat([policy.logprobs(sample)[0] for sample in samples])
        save_file(found, self.reference)

    def add(self, one_process: Path) -> None:
        save_file(load_file(self.reference) | load_file(one_process), self.reference)


class Launcher:
    """Runs combinations in ``folder``; a family's policies and their reference are made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._one_process: Results = {}  # by family

    def run(self, combinations: Sequence[Combination]) -> Results:
        """All of them take the same number of processes. Raises ``AssertionError`` with the
        ranks' errors when one of them fails or does not end in time."""
        for combination in combinations:
            self.one_process(combination.family)
        return self._launch(combinations) if combinations else {}

    def one_process(self, family: str) -> dict:
        """What a single process finds, which the others are compared with."""
        if family not in self._one_process:
            policies = Policies(self._folder / family)
            policies.write()
            alone = Combination("alone", 1, {}, family, faults=True, modes=True)
            self._one_process[family] = self._launch([alone])[alone.name]
            policies.add(Path(f"{self._out(1)}.safetensors"))
        return self._one_process[family]

    def _launch(self, combinations: Sequence[Combination]) -> Results:
        (processes,) = {combination.processes for combination in combinations}
        job = self._folder / f"job-{processes}.json"
        settings = [combination.settings() for combination in combinations]
        job.write_text(json.dumps({"folder": str(self._folder), "combinations": settings}))
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
