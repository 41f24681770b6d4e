"""``agent-rl bench``: measurements that a claim can be checked with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agent_rl.commands.bench_overlap import overlap
from agent_rl.commands.bench_r3 import r3
from agent_rl.commands.bench_trainer import trainer
from agent_rl.commands.figures import show_figures
from agent_rl.commands.terminal import make_console

bench_app = typer.Typer(help="Measurements, as ratios inside one run.", no_args_is_help=True)
bench_app.command(
    epilog="Examples: agent-rl bench r3 --json r3.json · agent-rl bench r3 runs/repair_tiny"
)(r3)
bench_app.command(epilog="Example: agent-rl bench trainer --json trainer.json")(trainer)
bench_app.command(epilog="Example: agent-rl bench overlap configs/repair_tiny.yaml")(overlap)
JsonFile = Annotated[Path | None, typer.Option(help="also write flat JSON here")]


@bench_app.command(
    epilog="Example: agent-rl bench engine --json engine.json (needs scripts/engines/install.sh)"
)
def engine(
    kind: Annotated[str, typer.Option(help="sglang or vllm")] = "sglang",
    policy: Annotated[
        Path | None, typer.Option(help="model folder; default: a random MoE of 7.4 M parameters")
    ] = None,
    pairs: Annotated[int, typer.Option(help="paired runs with and without capture")] = 6,
    json: JsonFile = None,
) -> None:
    """Rows, bytes, client CPU and throughput of routing capture on a real server, on CPU."""
    import tempfile

    from agent_rl.bench.engine import measure as measure_engine
    from agent_rl.model.random_policy import write_random_policy
    from agent_rl.run.warmstart.train import TinyMoEShape

    if kind not in ("sglang", "vllm"):
        raise typer.BadParameter(f"got {kind!r}, expected sglang or vllm", param_hint="--kind")
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        model = policy or write_random_policy(
            Path(folder) / "policy",
            # Large enough that a step is spent in the model, small enough for two cores.
            shape=TinyMoEShape(256, 4, 4, 64, num_experts=16, expert_width=128),
        )
        figures = asyncio.run(
            measure_engine(kind, model, Path(folder), num_pairs=pairs, report=console.print)
        )
    title = f"{kind} on CPU, 4 samples of 12 turns"
    show_figures(console, title, figures.to_json(), json, form=".4g")


@bench_app.command(epilog="Example: agent-rl bench cache --json cache.json")
def cache(json: JsonFile = None) -> None:
    """Size and speed of the routing cache against plain numpy (under 90 seconds)."""
    from routing_cache.bench import main

    raise typer.Exit(main([] if json is None else ["--json", str(json)]))


@bench_app.command(
    epilog="Example: agent-rl bench sandbox --json sandbox.json (needs a container engine: "
    "scripts/docker/start.sh)"
)
def sandbox(
    image: Annotated[str | None, typer.Option(help="image to run, one with bash")] = None,
    episodes: Annotated[int, typer.Option(help="episodes played under random kills")] = 200,
    json: JsonFile = None,
) -> None:
    """Latency of each kind of sandbox, and what killed controllers leave behind."""
    from agent_rl.bench.sandbox import DEFAULT_IMAGE, main

    main(json, image=image or DEFAULT_IMAGE, episodes=episodes)
