"""The micro-world's grammar: the events that can happen in a story, how they are told, what they change.

The teller (`data.microworld`) and the reader (`data.grading`) share this table. An event is a few sentence
templates with named roles, what must be true before it, and what is true after it. A role is either settled
by the state (`data.scene`) or chosen as it is spoken. Two rules keep the text unambiguous, so that it
determines every choice: no two events begin alike, and every choice is spoken.

    {owner}   who owns the object, and their place: {here}
    {other}   the second person, and their place: {away}
    {object}  with its {quality}; while its owner does not have it, it is in the {spot}
    {object2} with its {quality2}: what it was traded for, by the {trader}
    {animal}  the one animal of the story
    {there} and {meeting}, new places, {feeling} and {time} last for one event

`{owner:she}`, `{owner:her}` and `{owner:She}` are that person's pronouns. The opening also
records the {hero}, its first owner, and where that was: {first}.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from string import Formatter
from typing import NamedTuple

PRONOUNS = {
    "she": {"she": "she", "her": "her", "She": "She"},
    "he": {"she": "he", "her": "him", "She": "He"},
}
PLACE_ROLES = frozenset({"here", "away", "spot", "there", "meeting"})
PASSING_ROLES = ("there", "meeting", "feeling", "time")


class Slot(NamedTuple):
    """The words before a role, the role, and the pronoun's form or "". Words that end a sentence: no role."""

    before: str
    role: str
    form: str


@dataclass(frozen=True)
class Event:
    """A thing that can happen: sentences, conditions before, assignments after."""

    name: str
    holder: str
    """Who must have the object before: "owner", "animal" or "nobody"."""
    company: str
    """Where the second person may be before, in words of "alone" (not met yet), "apart" and "together"."""
    sentences: tuple[str, ...]
    then_holder: str = ""
    """Who has the object after; empty where nothing changes."""
    after: Mapping[str, str] = field(default_factory=dict)
    """Role to the role (before) whose value it takes."""
    introduces: str = ""
    """A role that must not be taken yet."""

    @cached_property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """The sentences, split at their roles."""
        return tuple(split_template(sentence) for sentence in self.sentences)

    @cached_property
    def passage(self) -> tuple[Slot, ...]:
        """All the sentences as one, split at their roles."""
        return split_template(" ".join(self.sentences))


def split_template(template: str) -> tuple[Slot, ...]:
    """A sentence template as slots; ends with a slot without a role."""
    slots = [Slot(before, role or "", form or "") for before, role, form, _ in Formatter().parse(template)]
    return (*slots, Slot("", "", "")) if slots[-1].role else tuple(slots)


_ANY = "alone apart together"
_SWAP = {"owner": "other", "other": "owner"}

OPENING = Event(
    "opening", "owner", _ANY,
    ("One {time} {owner} was in the {here}.", "{owner:She} had a {quality} {object}."),
    after={"hero": "owner", "first": "here"},
)  # fmt: skip

EVENTS = (
    Event(
        "walk", "owner", _ANY,
        ("{owner} left the {here} and took the {object} to the {there}.",
         "In the {there} {owner:she} felt {feeling}."),
        after={"here": "there"},
    ),
    Event(
        "give", "owner", "alone apart",
        ("{owner} left the {here} and met {other} in the {meeting}.",
         "{owner} gave {other:her} the {quality} {object}, and {other} felt {feeling}."),
        after=_SWAP | {"here": "meeting", "away": "meeting"},
    ),
    Event(
        "hand", "owner", "together",
        ("{owner} gave the {object} to {other} in the {here}.",
         "{other} took the {quality} {object} and felt {feeling}."),
        after=_SWAP,
    ),
    Event(
        "trade", "owner", "alone apart",
        ("{owner} saw {other} come to the {here} with a {quality2} {object2}.",
         "{owner} took the {quality2} {object2} and gave {other:her} the {quality} {object}."),
        after=_SWAP | {"away": "here", "trader": "owner"}, introduces="object2",
    ),
    Event(
        "lose", "owner", _ANY,
        ("{owner} went to the {there} and lost the {object}.",
         "Without it {owner:she} went back to the {here} and felt {feeling}."),
        then_holder="nobody", after={"spot": "there"},
    ),
    Event(
        "hide", "owner", _ANY,
        ("{owner} hid the {quality} {object} in the {there}.",
         "Then {owner:she} went back to the {here} and felt {feeling}."),
        then_holder="nobody", after={"spot": "there"},
    ),
    Event(
        "steal", "owner", _ANY,
        ("The {animal} took the {object} from {owner} in the {here}.",
         "It ran to the {there}, and {owner} felt {feeling}."),
        then_holder="animal", after={"spot": "there"},
    ),
    Event(
        "fetch", "nobody", _ANY,
        ("{owner} went back to the {spot} and saw the {object}.",
         "{owner:She} took the {quality} {object} and felt {feeling}."),
        then_holder="owner", after={"here": "spot"},
    ),
    Event(
        "keep", "nobody", _ANY,
        ("Then {other} came to the {spot} and saw the {quality} {object}.",
         "{other:She} took it and felt {feeling}."),
        then_holder="owner", after=_SWAP | {"here": "spot", "away": "here"},
    ),
    Event(
        "return", "nobody", _ANY,
        ("Then {other} found the {quality} {object} in the {spot}.",
         "{other} took it back to {owner} in the {here}."),
        then_holder="owner", after={"away": "here"},
    ),
    Event(
        "carry", "nobody", _ANY,
        ("The {animal} found the {quality} {object} in the {spot}.",
         "Then the {animal} took it to the {there}."),
        then_holder="animal", after={"spot": "there"},
    ),
    Event(
        "chase", "animal", _ANY,
        ("{owner} ran after the {animal} to the {spot}.",
         "{owner:She} took the {quality} {object} back and felt {feeling}."),
        then_holder="owner", after={"here": "spot"},
    ),
    Event(
        "rescue", "animal", _ANY,
        ("Then {other} ran to the {spot} and met the {animal}.",
         "{other} took the {quality} {object} back to {owner} in the {here}."),
        then_holder="owner", after={"away": "here"},
    ),
    Event(
        "drop", "animal", _ANY,
        ("The {animal} left the {spot} and ran to the {there}.",
         "In the {there} it lost the {quality} {object}."),
        then_holder="nobody", after={"spot": "there"},
    ),
)  # fmt: skip

ENDINGS = {
    "owner": Event(
        "held", "owner", _ANY,
        ("In the end {owner} had the {quality} {object} in the {here}.",),
    ),
    "nobody": Event(
        "lying", "nobody", _ANY,
        ("In the end {owner}'s {quality} {object} was in the {spot}.",),
    ),
    "animal": Event(
        "carried", "animal", _ANY,
        ("In the end the {animal} had {owner}'s {quality} {object} in the {spot}.",),
    ),
}  # fmt: skip
