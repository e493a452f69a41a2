"""The commands about devices rather than plans: what is known of them, and what is here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from autopar.base.cluster import Cluster
from autopar.command_line import NO, note, show, show_json

AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


def preset_names(typed: str) -> list[str]:
    """The names of clusters that begin so."""
    return [name for name in Cluster.presets() if name.startswith(typed)]


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Save the cluster here, as TOML."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            help="What is not measured: how many nodes, and the links between them.",
            autocompletion=preset_names,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.", min=0.1)] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Measure the devices of this machine, for plans that fit them.

    Products of matrices by dtype, memory, the start of kernels and of collectives, links.
    JAX_NUM_CPU_DEVICES=8 measures so many virtual devices.
    """
    from autopar.calibration import calibrate
    from autopar.report.cluster_tables import measured_table

    note("measuring ...")
    found = calibrate(None if cluster is None else Cluster.named(cluster), seconds=seconds)
    if output is not None:
        found.cluster.save(output)
    if as_json:
        numbers = [dataclasses.asdict(number) for number in found.numbers]
        show_json({"cluster": found.cluster.to_dict(), "measured": numbers})
        return
    rows = [(x.name, x.value, x.before, x.unit) for x in found.numbers]
    show(measured_table(str(found.cluster), rows))
    if output is not None:
        note(f"saved as {output}; --cluster {output} or cluster='{output}' plans with it.")
    else:
        note("-o cluster.toml saves it for --cluster and cluster=.")


def presets(
    name: Annotated[
        str | None,
        typer.Argument(help='One cluster: h100, "8x8 h100", a file.', autocompletion=preset_names),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The clusters that autopar has numbers of, or one of them."""
    from autopar.report.cluster_tables import cluster_card, presets_table

    if name is not None:
        cluster = Cluster.named(name)
        if as_json:
            show_json(cluster.to_dict())
        else:
            show(cluster_card(cluster))
    elif as_json:
        show_json({known: Cluster.preset(known).to_dict() for known in Cluster.presets()})
    else:
        show(presets_table())


def doctor(as_json: AsJson = False) -> None:
    """What is installed and what is missing: versions, devices, Ray, wheels."""
    from autopar.doctor import examine, findings_table

    found = examine()
    if as_json:
        show_json([dataclasses.asdict(item) for item in found])
    else:
        show(findings_table(found))
    if any(item.state == "needed" for item in found):
        raise typer.Exit(NO)
