"""Households in ALFWorld's format, with its domain, grammar and goals; its own data is not here."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from alfworld.gen.goal_library import gdict  # pyright: ignore[reportMissingImports]
from alfworld.info import (  # pyright: ignore[reportMissingImports]
    ALFRED_PDDL_PATH,
    ALFRED_TWL2_PATH,
)

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
_PLACES = {"Cabinet": 2, "Drawer": 2, "Fridge": 1, "Microwave": 1, "SinkBasin": 1, "Shelf": 1}
_TARGETS = {"CounterTop": 1, "SideTable": 1, "Desk": 1}
_OPENABLE = ("Cabinet", "Drawer", "Fridge", "Microwave")
_THINGS = ("Apple", "Mug", "Egg", "Plate")
_START = "loc_bar_9_bar_9_bar_0_bar_30"


def make_household(folder: Path, kind: str, seed: int, *, size: int = 1) -> Path:
    """Writes a game of a kind of task, with the files that ALFWorld's expert reads.

    `size` is how many times the places of the smallest it has.
    """
    draw = random.Random(seed)
    goals, thing = gdict[kind], draw.choice(_THINGS)
    target = draw.choice(sorted(_TARGETS))
    names = {"obj": thing, "recep": target, "toggle": "DeskLamp", "mrecep": ""}
    goal = goals["pddl"].format(**names).replace(" # ", " - ")
    task = draw.choice(goals["templates"]).format(**{key: v.lower() for key, v in names.items()})
    below = folder / f"{kind}-{thing}-None-{target}-{seed}" / "trial_T1"
    below.mkdir(parents=True)
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text("utf-8"),
        "grammar": Path(ALFRED_TWL2_PATH).read_text("utf-8").replace("UNKNOWN GOAL", task),
        "pddl_problem": f"{_problem(draw, thing, target, size)}{goal}",
        "solvable": True,
        "walkthrough": None,
    }
    path = below / "game.tw-pddl"
    path.write_text(json.dumps(game), encoding="utf-8")
    parameters = {
        "object_target": thing,
        "parent_target": target,
        "toggle_target": "DeskLamp" if "light" in kind else "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    about = {"task_type": kind, "pddl_params": parameters, "turk_annotations": {"anns": []}}
    (below / "traj_data.json").write_text(json.dumps(about), encoding="utf-8")
    return path


def _problem(draw: random.Random, thing: str, target: str, size: int) -> str:
    """Objects and facts of a kitchen: a lamp, two of what is wanted, one of each other."""
    places = [
        (kind, _identifier(draw, kind))
        for kind, number in (_PLACES | _TARGETS).items()
        for _ in range(number * size)
    ]
    things = [(kind, _identifier(draw, kind)) for kind in (*_THINGS, thing, "DeskLamp")]
    where = {
        place: f"loc_bar_{index}_bar_1_bar_0_bar_30" for index, (_, place) in enumerate(places)
    }
    facts = [f"atLocation agent1 {_START}"]
    for kind, place in places:
        facts += [
            f"receptacleType {place} {kind}Type",
            f"receptacleAtLocation {place} {where[place]}",
        ]
        facts += [f"openable {place}"] * (kind in _OPENABLE)
    for kind, one in things:
        is_lamp = kind == "DeskLamp"
        spots = [p for k, p in places if (k == "Desk" if is_lamp else k in _PLACES)]
        place = draw.choice(spots)
        facts += [f"objectType {one} {kind}Type", f"inReceptacle {one} {place}"]
        facts += [f"wasInReceptacle {one} {place}", f"objectAtLocation {one} {where[place]}"]
        abilities = (
            ("toggleable",) if is_lamp else ("pickupable", "cleanable", "heatable", "coolable")
        )
        facts += [f"{ability} {one}" for ability in abilities]
    place_kinds, thing_kinds = sorted({k for k, _ in places}), sorted({k for k, _ in things})
    facts += [f"canContain {p}Type {t}Type" for p, t in itertools.product(place_kinds, thing_kinds)]
    objects = ["agent1 - agent"]
    objects += [f"{kind}Type - otype" for kind in thing_kinds]
    objects += [f"{kind}Type - rtype" for kind in place_kinds]
    objects += [f"{one} - object" for _, one in things]
    objects += [f"{place} - receptacle" for _, place in places]
    objects += [f"{location} - location" for location in (*where.values(), _START)]
    lines = "\n".join(objects), "\n".join(f"({fact})" for fact in facts)
    return (
        "(define (problem household)\n(:domain alfred)\n(:objects\n{}\n)\n(:init\n{}\n)\n".format(
            *lines
        )
    )


def _identifier(draw: random.Random, kind: str) -> str:
    """As in ALFRED: what it is and where, such as `Mug_bar__plus_01_dot_20_bar_...`."""
    numbers = [
        f"_{draw.choice(('plus', 'minus'))}_0{draw.randrange(4)}_dot_{draw.randrange(99):02}"
        for _ in range(3)
    ]
    name = "Sink" if kind == "SinkBasin" else kind
    return "_bar_".join((name, *numbers, *["SinkBasin"] * (kind == "SinkBasin")))
