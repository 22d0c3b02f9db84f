"""The micro-world's words, and its state: what is true at one moment of a story and what can happen next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data.grammar import ENDINGS, EVENTS, PASSING_ROLES, PLACE_ROLES, Event


@dataclass(frozen=True)
class World:
    """The words of a world, and the pairs it holds out.

    People, places and objects are of two kinds each. A second one in a story, or the place that somebody goes
    to, is of the other kind: easy to learn, where "any but this one" is not (docs/log.md).
    """

    people: Mapping[str, str]
    """Name to "she" or "he"."""
    places: Mapping[str, str]
    """Place to "inside" or "outside"."""
    objects: Mapping[str, str]
    """Object to "toy" or "tool"."""
    qualities: tuple[str, ...]
    animals: tuple[str, ...]
    feelings: tuple[str, ...]
    times: tuple[str, ...]
    never: Mapping[str, str] = field(default_factory=dict)
    """Person to the one place held out for them: no training story names both."""


_SHE = ("Zoë", "Łucja", "Ngọc", "Ada", "Noor", "Ida", "Mira", "Hana")
_HE = ("Søren", "José", "Kofi", "Rafi", "Ben", "Milo", "Tom", "Otto")
_PLACES = ("kitchen", "garden", "barn", "mill", "cave", "park", "shop", "hall", "tower", "yard")
_OUTSIDE = ("garden", "cave", "park", "tower", "yard")
_OBJECTS = ("kite", "lamp", "drum", "bell", "key", "map", "cup", "hat", "ball", "book", "coin", "rope")
_TOYS = ("kite", "drum", "bell", "hat", "ball", "book")
_SKIES = ("rainy", "windy", "sunny", "cold")

# Short words, because a small BPE vocabulary pays a merge for nearly every letter.
WORLD = World(
    people=dict.fromkeys(_SHE, "she") | dict.fromkeys(_HE, "he"),
    places={place: "outside" if place in _OUTSIDE else "inside" for place in _PLACES},
    objects={thing: "toy" if thing in _TOYS else "tool" for thing in _OBJECTS},
    qualities=("red", "blue", "green", "tiny", "new", "big", "soft", "long"),
    animals=("goat", "fox", "crow", "dog", "cat", "hen"),
    feelings=("happy", "sad", "proud", "glad", "calm", "brave"),
    times=tuple(f"{sky} {hour}" for sky in _SKIES for hour in ("morning", "evening")),
    never={name: _PLACES[(7 * index + 2) % len(_PLACES)] for index, name in enumerate(_SHE + _HE)},
)

_POSSIBLE = {
    (holder, company): tuple(e for e in EVENTS if e.holder == holder and company in e.company.split())
    for holder in ENDINGS
    for company in ("alone", "apart", "together")
}


class Scene:
    """The value of every role that is taken, and who has the object: "owner", "animal" or "nobody".

    With `held_out`, the story begins with a person in the place held out for them.
    """

    def __init__(self, world: World, *, held_out: bool = False):
        self.world = world
        self.held_out = held_out
        self.roles: dict[str, str] = {}
        self.holder = "owner"
        self._places_named: list[str] = []

    @property
    def company(self) -> str:
        """Where the second person is: "alone" (nobody met yet), "apart" or "together"."""
        if "other" not in self.roles:
            return "alone"
        return "together" if self.roles["away"] == self.roles["here"] else "apart"

    def events(self) -> Sequence[Event]:
        """The events that can happen now; there is always one."""
        possible = _POSSIBLE[self.holder, self.company]
        return [event for event in possible if event.introduces not in self.roles]

    def options(self, role: str) -> Sequence[str]:
        """The equally likely values of a role that is not settled yet."""
        world, roles = self.world, self.roles
        match role:
            case "owner":
                return tuple(world.people)
            case "other":
                named = self._places_named
                return [name for name in self._unlike(role) if world.never.get(name) not in named]
            case "here":
                never_here = world.never.get(roles["owner"])
                return [place for place in world.places if (place == never_here) == self.held_out]
            case "meeting" if "away" in roles:
                return (roles["away"],)
            case "there" | "meeting":
                barred = {roles["here"], roles.get("away")}
                barred |= {world.never.get(roles[person]) for person in ("owner", "other") if person in roles}
                return [place for place in self._unlike(role) if place not in barred]
            case "object":
                return tuple(world.objects)
            case "object2":
                return self._unlike(role)
            case "quality" | "quality2":
                return world.qualities
            case "animal":
                return world.animals
            case "feeling":
                return world.feelings
            case "time":
                return world.times
        raise KeyError(f"role {role!r} is never chosen: the story has to settle it first")

    def contrast(self, role: str) -> tuple[Mapping[str, str], str]:
        """The words a role is chosen from, with their kinds, and the one it must not be."""
        world, roles = self.world, self.roles
        match role:
            case "other":
                return world.people, roles["owner"]
            case "object2":
                return world.objects, roles["object"]
        return world.places, roles.get("spot", roles["here"])

    def _unlike(self, role: str) -> Sequence[str]:
        words, value = self.contrast(role)
        return [word for word, kind in words.items() if kind != words.get(value)]

    def settle(self, role: str, value: str) -> None:
        """Give a role its value."""
        self.roles[role] = value
        if role in PLACE_ROLES:
            self._places_named.append(value)

    def finish(self, event: Event) -> None:
        """Make true what is true after `event`, and forget the roles that were only for it."""
        self.roles |= {role: self.roles[source] for role, source in event.after.items()}
        self.holder = event.then_holder or self.holder
        for role in PASSING_ROLES if self.holder != "owner" else (*PASSING_ROLES, "spot"):
            self.roles.pop(role, None)
