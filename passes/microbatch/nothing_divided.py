"""The refusal of microbatches that would divide nothing."""

from __future__ import annotations

from autopar.base.errors import InexactMicrobatchError
from autopar.passes.graph.graph import Graph, user_source, variables


def nothing_divided(graph: Graph, num_microbatches: int) -> InexactMicrobatchError:
    """The error for a step of which nothing is computed for each example of its batch.

    Such as one that draws its rows by number from a data set that was taken for the batch.
    """
    batch = [
        (label, var)
        for label, var in zip(graph.inputs, graph.jaxpr.invars, strict=True)
        if label.role == "batch" and label.batch_axis is not None
    ]
    label, _ = batch[0]
    given = {var for _, var in batch}
    reader = next((x for x in graph.jaxpr.eqns if not given.isdisjoint(variables(x.invars))), None)
    others = f" (and {len(batch) - 1} more)" if len(batch) > 1 else ""
    used = "the step does not read it"
    if reader is not None:
        used = (
            "its rows are taken by number, or put into a whole array by number (read first by "
            f"`{reader.primitive}`)"
        )
    return InexactMicrobatchError(
        f"the step cannot be split into {num_microbatches} microbatches: nothing of it is computed"
        " for each example of its batch.",
        where=user_source(reader) if reader is not None else label.path,
        why=f"dimension {label.batch_axis} of {label.path}{others} was taken for the batch, and "
        f"{used}.",
        hint="draw the rows of a step before it and pass those (or their numbers) as its batch; or "
        "say by batch_argnums or batch_axes what the batch is; or use microbatches=1.",
    )
