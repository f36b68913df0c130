"""The page Rollouts: a run's steps, the groups of a step, the completions of a group, the tokens of a completion."""

from __future__ import annotations

from posttrain.reports.markup import Markup, el, join, link, message, number, short, table
from posttrain.store.stored_rollouts import StoredRun
from posttrain.viewing.address import Query, address
from posttrain.viewing.viewer import Viewer

PATH = "/rollouts"


def rollouts_page(viewer: Viewer, query: Query) -> Markup:
    row = viewer.runs.find(query.one("run"))
    if row is None or not row.has_rollouts:
        having = [one for one in viewer.runs.rows() if one.has_rollouts]
        items = [el("li", link(one.name, address(PATH, run=one.name))) for one in having]
        return join([message("Rollouts of which run?" if having else "No run here has rollouts."), el("ul", *items)])
    with StoredRun(row.folder) as stored:
        step = query.integer("step")
        if step is None:
            rows = [
                [link(one["step"], query.but(PATH, step=one["step"])), one["completions"], number(one["reward"])]
                for one in stored.summary()
            ]
            return join([el("h1", row.name), table(["step", "completions", "reward"], rows, numbers=(1, 2))])
        stored.require(step)
        rows = [
            [one["prompt_index"], number(one["reward"]), number(one["advantage"]), short(one["completion"])]
            for one in stored.rollouts(step)
        ]
        return join([el("h1", row.name), table(["prompt", "reward", "advantage", "completion"], rows, numbers=(1, 2))])
