"""Makes households in ALFWorld's format, in its own rooms, where its data cannot be downloaded.

    .textworld/bin/python -m benchmarks.households FOLDER [--train 600] [--valid 134]

The package alfworld has the 120 rooms of ALFRED: what things and what places each has. It also has
the domain, the grammar and the goals of its games. What it lacks, and this module draws by a seed,
is where things lie and what is to be done. Rooms whose number ends in 0 are in `valid_unseen`
only (two with a desk lamp, three with a microwave); `valid_seen` has new games in the rooms of
`train`. `make test-interop` makes the environment.
"""

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = {
    "pick_and_place_simple": "",
    "look_at_obj_in_light": "DeskLamp",
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
    "pick_two_obj_and_place": "",
}
"""The kinds of tasks, and what each needs in its room."""
KINDS = tuple(TOOLS)
_ABILITIES = {
    "pick_clean_then_place_in_recep": "Cleanable",
    "pick_heat_then_place_in_recep": "Heatable",
    "pick_cool_then_place_in_recep": "Coolable",
}
KITCHENS = tuple(range(1, 31))
ROOMS = (*KITCHENS, *range(201, 231), *range(301, 331), *range(401, 431))
"""ALFRED's: kitchens, living rooms, bedrooms and bathrooms."""
_LAMP = "DeskLamp"
_OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}
_BASINS = {"Sink": "SinkBasin", "Bathtub": "BathtubBasin"}
_MOVABLE = {"Bowl", "Box", "Cup", "Mug", "Pan", "Plate", "Pot"}
"""Things that can hold others in ALFRED. Here, as in ALFWorld, they are things only."""
_LAMP_STANDS = ("Desk", "SideTable", "Dresser", "DiningTable", "CoffeeTable", "Shelf")
_SETS = {"StoveBurner": 4}
"""How many of a place there are, where the file of the room does not say."""
_START = "loc_bar_9_bar_9_bar_0_bar_30"


@dataclass(frozen=True)
class _Package:
    """What the package alfworld has: texts of its domain and grammar, goals, what goes where."""

    domain: str
    grammar: str
    goals: Mapping[str, Mapping[str, Any]]
    """By the kind of task: `pddl` and `templates`."""
    holds: Mapping[str, Collection[str]]
    """By the kind of place, the kinds of things."""
    able: Mapping[str, Collection[str]]
    """By the ability, such as `Cleanable`, the kinds of things."""
    layouts: Path


@cache
def _package() -> _Package:
    from alfworld import gen, info  # pyright: ignore[reportMissingImports]
    from alfworld.gen import constants, goal_library  # pyright: ignore[reportMissingImports]

    return _Package(
        domain=Path(info.ALFRED_PDDL_PATH).read_text("utf-8"),
        grammar=Path(info.ALFRED_TWL2_PATH).read_text("utf-8"),
        goals=goal_library.gdict,
        holds=constants.VAL_RECEPTACLE_OBJECTS,
        able=constants.VAL_ACTION_OBJECTS,
        layouts=Path(gen.__file__).parent / "layouts",
    )


@dataclass(frozen=True)
class Room:
    """Kinds of places, once for each place, and kinds of things."""

    places: Sequence[str]
    things: Sequence[str]


def make_household(folder: Path, kind: str, seed: int, *, rooms: Sequence[int] = ROOMS) -> Path:
    """Writes a game of a kind of task, with the files that ALFWorld's expert reads.

    The room, the thing and the place that the task names are drawn from those that fit.
    """
    draw = random.Random(f"{kind} {seed}")
    number = draw.choice([one for one in rooms if _choices(kind, one)])
    thing, target = draw.choice(_choices(kind, number))
    package = _package()
    goals = package.goals[kind]
    names = {"obj": thing, "recep": target, "toggle": _LAMP, "mrecep": ""}
    goal = goals["pddl"].format(**names).replace(" # ", " - ")
    task = draw.choice(goals["templates"]).format(**{key: v.lower() for key, v in names.items()})
    is_by_light = TOOLS[kind] == _LAMP
    title = "-".join((kind, thing, "None", _LAMP if is_by_light else target, str(number)))
    below = folder / title / f"trial_T{seed:06}"
    below.mkdir(parents=True)
    game = {
        "pddl_domain": package.domain,
        "grammar": package.grammar.replace("UNKNOWN GOAL", task),
        "pddl_problem": f"{_problem(draw, room_of(number), kind, thing, target)}{goal}",
        "solvable": True,
        "walkthrough": None,
    }
    path = below / "game.tw-pddl"
    path.write_text(json.dumps(game), encoding="utf-8")
    parameters = {
        "object_target": thing,
        "parent_target": "" if is_by_light else target,
        "toggle_target": _LAMP if is_by_light else "",
        "mrecep_target": "",
        "object_sliced": False,
    }
    about = {"task_type": kind, "pddl_params": parameters, "turk_annotations": {"anns": []}}
    (below / "traj_data.json").write_text(json.dumps(about), encoding="utf-8")
    return path


@cache
def room_of(number: int) -> Room:
    """A room of ALFRED, by its number."""
    package = _package()
    below = package.layouts
    kinds = set(json.loads((below / f"FloorPlan{number}-objects.json").read_text("utf-8")))
    seen = json.loads((below / f"FloorPlan{number}-openable.json").read_text("utf-8"))
    counts = Counter(_BASINS.get(kind, kind) for kind in (name.split("|")[0] for name in seen))
    missing = kinds & (package.holds.keys() - _MOVABLE - counts.keys())
    counts |= {kind: _SETS.get(kind, 1) for kind in missing}
    places = {kind: n for kind, n in counts.items() if kind in package.holds}
    things = sorted(kind for kind in kinds if any(_can_hold(place, kind) for place in places))
    return Room(sorted(Counter(places).elements()), things)


@cache
def _choices(kind: str, number: int) -> Sequence[tuple[str, str]]:
    """Things and places that a task of this kind can name in a room."""
    room = room_of(number)
    if TOOLS[kind] not in ("", *room.places, *room.things):
        return []
    able = _package().able.get(_ABILITIES.get(kind, ""), set(room.things))
    return [
        (thing, place)
        for thing in room.things
        for place in sorted(set(room.places))
        if thing in able
        and thing != _LAMP
        and _can_hold(place, thing)
        and place != TOOLS[kind]  # where it was cleaned, heated or cooled
        and _spots(thing, room.places, place)
    ]


def _can_hold(place: str, thing: str) -> bool:
    if thing == _LAMP:
        return place in _LAMP_STANDS
    return thing in _package().holds[place]


def _spots(thing: str, places: Sequence[str], target: str) -> Sequence[int]:
    """Places that a thing can lie in at first, by index: not where it has to go."""
    return [
        index for index, place in enumerate(places) if _can_hold(place, thing) and place != target
    ]


def _problem(draw: random.Random, room: Room, kind: str, thing: str, target: str) -> str:
    """Objects and facts of a household."""
    places = [(place, _identifier(draw, place)) for place in room.places]
    where = {name: f"loc_bar_{i}_bar_1_bar_0_bar_30" for i, (_, name) in enumerate(places)}
    counts = {one: 1 if one == _LAMP else draw.choice((1, 1, 2)) for one in room.things}
    if kind == "pick_two_obj_and_place":
        counts[thing] = draw.choice((2, 3))
    things = [(one, _identifier(draw, one)) for one in Counter(counts).elements()]
    facts = [f"atLocation agent1 {_START}", *_about_places(places, where)]
    for one, name in things:
        spots = _spots(one, room.places, target if one == thing else "")
        _, place = places[draw.choice(spots)]
        facts += [f"objectType {name} {one}Type", f"inReceptacle {name} {place}"]
        facts += [f"wasInReceptacle {name} {place}", f"objectAtLocation {name} {where[place]}"]
        facts += [f"{ability} {name}" for ability in _abilities(one)]
    pairs = itertools.product(sorted({p for p, _ in places}), sorted({t for t, _ in things}))
    facts += [f"canContain {p}Type {t}Type" for p, t in pairs if _can_hold(p, t)]
    objects = ["agent1 - agent"]
    objects += [f"{one}Type - otype" for one in sorted({t for t, _ in things})]
    objects += [f"{one}Type - rtype" for one in sorted({p for p, _ in places})]
    objects += [f"{name} - object" for _, name in things]
    objects += [f"{name} - receptacle" for _, name in places]
    objects += [f"{location} - location" for location in (*where.values(), _START)]
    lines = "\n".join(objects), "\n".join(f"({fact})" for fact in facts)
    return (
        "(define (problem household)\n(:domain alfred)\n(:objects\n{}\n)\n(:init\n{}\n)\n".format(
            *lines
        )
    )


def _about_places(places: Sequence[tuple[str, str]], where: Mapping[str, str]) -> Iterator[str]:
    for kind, name in places:
        yield f"receptacleType {name} {kind}Type"
        yield f"receptacleAtLocation {name} {where[name]}"
        if kind in _OPENABLE:
            yield f"openable {name}"


def _abilities(thing: str) -> list[str]:
    named = [
        one.lower()
        for one in ("Cleanable", "Heatable", "Coolable", "Toggleable")
        if thing in _package().able[one]
    ]
    return named if thing == _LAMP else ["pickupable", *named]


def _identifier(draw: random.Random, kind: str) -> str:
    """As in ALFRED: what it is and where, such as `Mug_bar__plus_01_dot_20_bar_...`."""
    numbers = [
        f"_{draw.choice(('plus', 'minus'))}_0{draw.randrange(4)}_dot_{draw.randrange(99):02}"
        for _ in range(3)
    ]
    name = {basin: short for short, basin in _BASINS.items()}.get(kind, kind)
    return "_bar_".join((name, *numbers, *[kind] * (kind in _BASINS.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=600, help="games to train on")
    parser.add_argument("--valid", type=int, default=134, help="games of each held-out split")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty; name another folder, or remove this one")
    held_out = [number for number in ROOMS if number % 10 == 0]
    others = [number for number in ROOMS if number % 10]
    splits = [("train", args.train, others), ("valid_seen", args.valid, others)]
    splits += [("valid_unseen", args.valid, held_out)]
    first = 0
    for split, number, rooms in splits:
        for index in range(first, first + number):
            kind = KINDS[index % len(KINDS)]
            make_household(args.folder / split, kind, index, rooms=rooms)
        first += number


if __name__ == "__main__":
    main()
