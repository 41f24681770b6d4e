"""``agent-rl bench``: measurements that a claim can be checked with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from agent_rl.commands.source import open_source
from agent_rl.store.run_folder import write_aside

if TYPE_CHECKING:
    from agent_rl.bench.r3 import MismatchRow

bench_app = typer.Typer(help="Measurements, as ratios inside one run.", no_args_is_help=True)
_REPLAY_NAMES = {"off": "no replay", "r3": "replay"}
_R3_LINES: tuple[tuple[str, Callable[[MismatchRow], str]], ...] = (
    ("sampled tokens", lambda row: f"{row.num_tokens:,}"),
    ("exact KL(rollout ‖ train)", lambda row: f"{row.kl_exact:.2e}"),
    ("  95 % interval, low", lambda row: f"{row.kl_low:.2e}"),
    ("  95 % interval, high", lambda row: f"{row.kl_high:.2e}"),
    ("k3 estimate", lambda row: f"{row.kl_k3:.2e}"),
    ("F(1.1)", lambda row: f"{row.f_1_1:.1e}"),
    ("F(2)", lambda row: f"{row.f_2:.1e}"),
    ("largest log-prob gap", lambda row: f"{row.max_logprob_gap:.3f}"),
    ("sets the live router flips", lambda row: f"{row.flip_rate:.2%}"),
    ("tokens with a flip", lambda row: f"{row.tokens_with_flip:.2%}"),
)
JsonFile = Annotated[Path | None, typer.Option(help="also write flat JSON here")]


@bench_app.command(
    epilog="Examples: agent-rl bench r3 configs/repair_tiny.yaml --json r3.json · "
    "agent-rl bench r3 runs/repair_tiny"
)
def r3(
    source: Annotated[Path, typer.Argument(help="a run folder, or a YAML configuration")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    min_tokens: Annotated[int, typer.Option(help="sampled tokens to score at least")] = 10_000,
    json: JsonFile = None,
) -> None:
    """Exact KL, k3, F(2) and router flips between engine and trainer, with and without replay."""
    from agent_rl.bench.r3 import measure, to_json

    console = Console()
    opened = open_source(source, overrides or [])
    rows = asyncio.run(
        measure(opened.config, opened.policy, min_tokens=min_tokens, report=console.print)
    )
    table = Table(title=f"{opened.description}, float32 trainer", title_justify="left")
    table.add_column("rollout engine")
    for row in rows:
        table.add_column(f"{row.engine_dtype}\n{_REPLAY_NAMES[row.replay]}", justify="right")
    for name, show in _R3_LINES:
        table.add_row(name, *(show(row) for row in rows))
    console.print(table)
    flat = to_json(rows)
    ratio = flat["bfloat16_kl_r3_over_off"]
    console.print(f"exact KL with replay over without, bfloat16 engine: {ratio:.2f}")
    if json is not None:
        write_aside(json, orjson.dumps(flat, option=orjson.OPT_INDENT_2) + b"\n")


@bench_app.command(
    epilog="Example: agent-rl bench engine --json engine.json (needs scripts/engines/install.sh)"
)
def engine(
    kind: Annotated[str, typer.Option(help="sglang or vllm")] = "sglang",
    policy: Annotated[
        Path | None, typer.Option(help="model folder; default: a random tiny MoE")
    ] = None,
    pairs: Annotated[int, typer.Option(help="paired runs with and without capture")] = 6,
    json: JsonFile = None,
) -> None:
    """Rows, bytes, client CPU and throughput of routing capture on a real server, on CPU."""
    import tempfile

    from agent_rl.bench.engine import measure as measure_engine
    from agent_rl.engines.random_policy import write_random_policy

    if kind not in ("sglang", "vllm"):
        raise typer.BadParameter(f"got {kind!r}, expected sglang or vllm", param_hint="--kind")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        model = policy or write_random_policy(Path(folder) / "policy")
        figures = asyncio.run(
            measure_engine(kind, model, Path(folder), num_pairs=pairs, report=console.print)
        )
    table = Table(title=f"{kind} on CPU, 4 samples of 12 turns", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.to_json().items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if json is not None:
        write_aside(json, orjson.dumps(figures.to_json(), option=orjson.OPT_INDENT_2) + b"\n")


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
