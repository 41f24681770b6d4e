"""``agent-rl bench r3``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from agent_rl.commands.source import open_source
from agent_rl.commands.terminal import make_console
from agent_rl.store.run_folder import write_aside

if TYPE_CHECKING:
    from agent_rl.bench.r3 import Measurement, MismatchRow
    from agent_rl.bench.r3_policies import Evidence

_SHOWN = {"off": "no replay, R2", "r3": "R3, R3 + TIS"}  # two modes a scoring pass
_COLUMNS: tuple[tuple[str, Callable[[MismatchRow], str]], ...] = (
    ("tokens", lambda row: f"{row.num_tokens:,}"),
    ("exact KL", lambda row: f"{row.kl_exact:.2e}"),
    ("95 % interval", lambda row: f"{row.kl_low:.1e} … {row.kl_high:.1e}"),
    ("k3", lambda row: f"{row.kl_k3:.1e}"),
    ("F(1.1)", lambda row: f"{row.f_1_1:.1e}"),
    ("F(2)", lambda row: f"{row.f_2:.1e}"),
    ("sets flipped", lambda row: f"{row.flip_rate:.2%}"),
    ("live would", lambda row: f"{row.live_flip_rate:.2%}"),
    ("tokens", lambda row: f"{row.tokens_with_flip:.2%}"),
    ("TIS cuts", lambda row: f"{row.tis_truncated:.0e}"),
)
_LEGEND = (
    "KL(rollout ‖ train) sums over the vocabulary. sets flipped: (token, layer) sets that the "
    "trainer used and the rollout had not chosen; live would: sets, and tokens in any layer, that "
    "the live router would have changed. R2 routes live against the rollout and acts inside the "
    "update, TIS acts on the loss weights: they share a pass with no replay and R3."
)


def r3(
    source: Annotated[
        Path | None,
        typer.Argument(help="a run folder, or a YAML configuration; default: shipped policies"),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    min_tokens: Annotated[
        int, typer.Option(help="sampled tokens to score at least", min=1)
    ] = 10_000,
    json: Annotated[
        Path | None, typer.Option(help="also write flat JSON here, pictures beside it")
    ] = None,
) -> None:
    """Exact KL, k3, F(2) and router flips between engine and trainer, by kind of replay.

    Without SOURCE: a 32-expert, an 8-expert and a dense policy under bfloat16, simulated fp8 and
    float32 engines (under 6 minutes on two free cores). With it: that run's or configuration's own
    policy under bfloat16 and float32 engines and its own ``engine.dtype``.
    """
    console = make_console()
    if not console.is_terminal:
        # A pipe has no width of its own, the tables need this one.
        console = make_console(width=145)
    if source is None:
        _shipped(console, min_tokens, json)
    else:
        _one(console, source, overrides or [], min_tokens, json)


def _one(
    console: Console, source: Path, overrides: Sequence[str], min_tokens: int, json: Path | None
) -> None:
    from agent_rl.bench.r3 import measure, to_json

    with open_source(source, overrides, console) as opened:
        engines = dict.fromkeys(("bfloat16", "float32", opened.config.engine.dtype))
        measured = asyncio.run(
            measure(
                opened.config,
                opened.policy,
                engine_dtypes=tuple(engines),
                min_tokens=min_tokens,
                report=console.print,
            )
        )
    console.print(_table(f"{opened.description}, float32 trainer", measured))
    flat = to_json([m.row for m in measured])
    ratio = flat["bfloat16_kl_r3_over_off"]
    console.print(f"exact KL with replay over without, bfloat16 engine: {ratio:.2f}")
    _write(json, flat)


def _shipped(console: Console, min_tokens: int, json: Path | None) -> None:
    from agent_rl.bench.r3_plots import plot_f_tau, plot_scatter
    from agent_rl.bench.r3_policies import evidence_json, measure_policies

    evidence = asyncio.run(measure_policies(min_tokens=min_tokens, report=console.print))
    for policy, measured in evidence.measured.items():
        console.print(_table(f"bench_{policy}, float32 trainer", measured))
    flat = evidence_json(evidence)
    _say(console, evidence, flat)
    _write(json, flat)
    if json is not None:
        for name, plot in (("scatter", plot_scatter), ("f_tau", plot_f_tau)):
            file = json.with_name(f"{json.stem}_{name}.png")
            plot(evidence, file)
            console.print(f"picture: {file}", soft_wrap=True)


def _say(console: Console, evidence: Evidence, flat: dict[str, float]) -> None:
    update = evidence.update
    console.print(
        f"32 experts, bfloat16: exact KL with R3 over without {flat['kl_r3_over_off']:.2f}, "
        f"over the dense control's {flat['kl_r3_over_dense']:.2f}",
        soft_wrap=True,
    )
    console.print(
        f"trainer against itself, same weights: KL {update.kl_train_train:.1e}; "
        f"R2 update against old pass: KL {update.kl_r2_update_old:.1e}; sets that one optimizer "
        f"step flips: {update.update_flip_rate_off:.2%} live, {update.update_flip_rate_r2:.2%} R2, "
        f"{update.update_flip_rate_r3:.2%} R3",
        soft_wrap=True,
    )


def _table(title: str, measured: Sequence[Measurement]) -> Table:
    table = Table(title=title, title_justify="left", caption=_LEGEND, caption_justify="left")
    table.add_column("engine", no_wrap=True)
    table.add_column("trainer", no_wrap=True)
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right")
    for m in measured:
        if m.row.replay in _SHOWN:
            figures = [show(m.row) for _, show in _COLUMNS]
            engine = m.row.engine_dtype.removesuffix("_simulated")
            table.add_row(engine, _SHOWN[m.row.replay], *figures)
    return table


def _write(json: Path | None, flat: dict[str, float]) -> None:
    if json is not None:
        write_aside(json, orjson.dumps(flat, option=orjson.OPT_INDENT_2) + b"\n")
