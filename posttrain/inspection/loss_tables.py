"""The results of the loss lab: tables for a terminal, and files."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from posttrain.evaluation.table import percent
from posttrain.inspection.losslab import Lab
from posttrain.reports.design import LIGHT, diverging, text_on
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.reports.markup import el, short
from posttrain.runs.files import save_json

CELL = 5  # width of a cosine in the terminal, in characters, with the gap
SIDE = 44  # side of a cosine's cell in the plot, in pixels


def show(lab: Lab, console: Console) -> None:
    """Print the table of losses, then the table of cosines if the console is wide enough."""
    console.print(f"step {lab.step} of {lab.folder}: {lab.batch}", soft_wrap=True)
    console.print(f"weights: {lab.weights}", soft_wrap=True)
    for line in lab.weights.skipped:
        console.print(f"skipped: {line}", soft_wrap=True)
    if lab.updates > 1:
        console.print(
            f"A step of this run has {lab.updates} updates. This is the first, over the whole batch; `at last` is the "
            "share clipped at the last update, given the stored log-probabilities."
        )
    console.print("row 1: this run's own loss; cosine: with its gradient")
    console.print(_losses(lab))
    if len(lab.rows) > 1 and CELL * len(lab.rows) + 4 > console.width:
        console.print("The cosines of all pairs are in the plot and the JSON file.")
    elif len(lab.rows) > 1:
        console.print("cosines between the gradients")
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in ("", *map(str, range(1, len(lab.rows) + 1))):
            table.add_column(name, justify="right", no_wrap=True)
        for number, row in enumerate(lab.cosines, start=1):
            table.add_row(str(number), *(_short(value) for value in row))
        console.print(table)
    own = lab.rows[0]
    if lab.logged is not None and own.norm is not None:
        difference = abs(own.norm - lab.logged) / lab.logged if lab.logged else abs(own.norm)
        logged = f"logged: {lab.logged:.6g} (relative difference {difference:.0e})"
        console.print(f"grad norm of row 1: {own.norm:.6g}, {logged}")
    if any(row[0] is None for row in lab.cosines):
        console.print("-: no cosine, because a gradient is 0 or not finite")
    by_reason: dict[str, list[str]] = {}
    for name, why in lab.left_out.items():
        reason = why.replace(f"loss_type: {name}", "the loss").replace(f" {name} ", " the loss ")
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        console.print(f"not computed: {', '.join(names)}: {reason}", soft_wrap=True)


def _losses(lab: Lab) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", justify="right")
    table.add_column("loss", overflow="fold")
    clips = any(row.clipped is not None for row in lab.rows)
    columns = ["value", "grad norm", "cosine", *(["clipped"] if clips else [])]
    columns += ["at last"] if lab.updates > 1 and clips else []
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for number, (row, cosine) in enumerate(zip(lab.rows, lab.cosines[0], strict=True), start=1):
        cells = [_number(row.loss), _number(row.norm), "-" if cosine is None else f"{cosine:+.3f}"]
        cells += [percent(row.clipped), percent(row.clipped_last)]
        table.add_row(str(number), row.variant.label, *cells[: len(columns)])
    return table


def save(lab: Lab, folder: Path) -> list[Path]:
    """Write `losses-step-N.json` and, for two or more losses, `losses-step-N.svg`. Return their paths."""
    paths = [folder / f"losses-step-{lab.step}.json"]
    save_json(paths[0], as_json(lab))
    if len(lab.rows) > 1:
        paths.append(paths[0].with_suffix(".svg"))
        write_drawings(paths[1], [cosines_drawing(lab)])
    return paths


def as_json(lab: Lab) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "run": str(lab.folder),
        "step": lab.step,
        "batch": lab.batch,
        "weights": {"name": lab.weights.name, "step": lab.weights.state.step, "exact": lab.weights.exact},
        "updates": lab.updates,
        "logged_grad_norm": lab.logged,
        "losses": [
            {
                "name": row.variant.name,
                "label": row.variant.label,
                "method": row.variant.method.model_dump(mode="json"),
                "loss": row.loss,
                "grad_norm": row.norm,
                "clipped": row.clipped,
                "clipped_last": row.clipped_last,
            }
            for row in lab.rows
        ],
        "cosines": lab.cosines,
        "left_out": [{"name": name, "reason": reason} for name, reason in lab.left_out.items()],
    }


def cosines_drawing(lab: Lab) -> Drawing:
    """A heat map of the cosines, with their values; grey where a cosine is undefined."""
    labels = [short(row.variant.label, 40) for row in lab.rows]
    left, count = 12 + 7 * max(map(len, labels)), len(labels)
    bottom, parts = SIDE * count, []
    for at, label in enumerate(labels):
        middle = SIDE * at + SIDE // 2
        turned = f"translate({left + middle + 4} {bottom + 6}) rotate(-90)"
        parts.append(el("text", label, class_="name end", x=left - 6, y=middle + 4))
        parts.append(el("text", label, class_="name end", transform=turned))
    for row, cosines in enumerate(lab.cosines):
        for column, cosine in enumerate(cosines):
            ground = LIGHT.line if cosine is None else diverging(cosine)
            label = "–" if cosine is None else f"{cosine:.2f}".replace("-0.00", "0.00")
            x, y, style = left + SIDE * column, SIDE * row, f"fill: {text_on(ground)}"
            parts.append(el("rect", x=x, y=y, width=SIDE, height=SIDE, fill=ground))
            parts.append(el("text", label, class_="middle", style=style, x=x + SIDE // 2, y=y + SIDE // 2 + 4))
    title = f"Cosines between gradients, step {lab.step}"
    return Drawing(title, (left + SIDE * count, bottom + left), parts, f"{count} losses: {', '.join(labels)}")


def _short(cosine: float | None) -> str:
    """A cosine in at most five characters: 1.00, .92, -.31."""
    return "-" if cosine is None else f"{cosine:.2f}".replace("0.", ".").replace("-.00", ".00")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
