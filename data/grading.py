"""Grades what a model wrote: does a story agree with itself, and is an answer the expected one?

A story is read sentence by sentence against the templates of `data.grammar`, and every name, pronoun, object
and place in it is compared with the state that the sentences before it have built up. It need not be a story
that the teller could tell: somebody in a place held out for them, or going where another already is,
contradicts nothing. After a contradiction the reader keeps what it knew and reads on, so that persons,
objects and places are each judged over the whole.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from data.grammar import ENDINGS, EVENTS, OPENING, PLACE_ROLES, PRONOUNS, Event, Slot
from data.scene import WORLD, Scene

Aspect = Literal["person", "object", "place"]
_ASPECTS: dict[str, Aspect] = {"owner": "person", "other": "person", **dict.fromkeys(PLACE_ROLES, "place")}
_FREE_ROLES = ("time", "feeling")
_NEW_ROLES = ("other", "object2", "there", "meeting")
_RECOGNIZED = (*EVENTS, *ENDINGS.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all persons (with their pronouns), objects and places agree; all False if it does not parse."""

    person: bool
    object: bool
    place: bool
    reason: str
    """The first contradiction, or the first sentence that does not fit; empty when consistent."""

    @property
    def consistent(self) -> bool:
        """All three at once."""
        return self.person and self.object and self.place


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice found in a text: the role it settled (or "event"), its value, and the teller's options."""

    role: str
    value: str
    options: tuple[str, ...]


class Misfit(Exception):
    """A sentence that no template fits where it stands."""


def grade_story(text: str) -> Verdict:
    """The verdict on the first line of `text`; never raises."""
    line = text.strip().split("\n", 1)[0].strip()
    reader = StoryReader(line, Scene(replace(WORLD, never={})))
    try:
        reader.read()
    except Misfit as misfit:
        return Verdict(False, False, False, str(misfit))
    wrong = {aspect for aspect, _ in reader.faults}
    reason = reader.faults[0][1] if reader.faults else ""
    return Verdict("person" not in wrong, "object" not in wrong, "place" not in wrong, reason)


def grade_answer(expected: str, produced: str) -> bool:
    """Equal, but for outer white space, the case of the first letter and one full stop at the end."""
    return _plain(expected) == _plain(produced)


def _plain(answer: str) -> str:
    answer = answer.strip().removesuffix(".")
    return answer[:1].lower() + answer[1:]


class StoryReader:
    """Reads one line from an empty scene on, and collects the choices in it and its contradictions."""

    def __init__(self, line: str, scene: Scene):
        self.scene = scene
        self.choices: list[Choice] = []
        self.faults: list[tuple[Aspect, str]] = []
        self._sentences = re.split(r"(?<=\.) ", line)
        self._position = 0

    def read(self) -> None:
        """Read to the end of the line. Raises `Misfit` at the first sentence that does not fit."""
        self._read_event(OPENING)
        while (event := self._recognize()) in EVENTS:
            possible = tuple(event.name for event in self.scene.events())
            self.choices.append(Choice("event", event.name, possible))
            self._check_conditions(event)
            self._read_event(event)
        self._check_conditions(event)
        self._read_event(event)
        if self._position < len(self._sentences):
            raise self._misfit("comes after the ending")

    def _recognize(self) -> Event:
        """The event or ending that the next sentence begins; no two begin alike."""
        for event in _RECOGNIZED:
            if self._match(event.slots[0]):
                return event
        raise self._misfit()

    def _match(self, slots: tuple[Slot, ...]) -> re.Match[str] | None:
        if self._position == len(self._sentences):
            return None
        return _pattern(slots).fullmatch(self._sentences[self._position])

    def _misfit(self, why: str = "does not fit") -> Misfit:
        if self._position == len(self._sentences):
            return Misfit("the story has no ending")
        return Misfit(f"sentence {self._position + 1} {why}: {self._sentences[self._position]!r}")

    def _fault(self, aspect: Aspect, what: str) -> None:
        sentence = self._sentences[self._position]
        self.faults.append((aspect, f"sentence {self._position + 1} {what}: {sentence!r}"))

    def _check_conditions(self, event: Event) -> None:
        """Note what must be true before `event` and is not; then suppose it, to read on."""
        scene, roles = self.scene, self.scene.roles
        if event.holder != scene.holder:
            self._fault("object", f"needs the object with {event.holder}, but it is with {scene.holder}")
            scene.holder = event.holder
            if event.holder == "owner":
                roles.pop("spot", None)
        if scene.company not in event.company.split():
            self._fault("person", f"needs the two people {event.company}, but they are {scene.company}")
            roles.pop("away", None)
            if event.company == "together":
                roles["away"] = roles["here"]
        if event.introduces in roles and roles["trader"] != roles["other"]:
            self._fault("object", f"gives away the {roles[event.introduces]} of another")

    def _read_event(self, event: Event) -> None:
        for slots in event.slots:
            match = self._match(slots)
            if match is None:
                raise self._misfit()
            for slot, said in zip((slot for slot in slots if slot.role), match.groups(), strict=True):
                if slot.form:
                    self._check_pronoun(slot, said)
                else:
                    self._check_value(slot.role, said)
            self._position += 1
        self.scene.finish(event)

    def _check_pronoun(self, slot: Slot, said: str) -> None:
        person = self.scene.roles[slot.role]
        gender = self.scene.world.people.get(person)
        if gender and said != PRONOUNS[gender][slot.form]:
            self._fault("person", f"has {said!r} for {person}")

    def _check_value(self, role: str, said: str) -> None:
        """Compare a word with the role's value, or settle the role if this is where it is chosen."""
        roles, aspect = self.scene.roles, _ASPECTS.get(role, "object")
        if role in roles:
            if said != roles[role]:
                self._fault(aspect, f"has {said!r} where the story has {roles[role]!r}")
            return
        # Only the reader meets an unknown spot: the object is said to lie somewhere while its owner has it.
        options = self.scene.world.places if role == "spot" else self.scene.options(role)
        if said not in options and not self._is_avoided(role, said):
            if role in _FREE_ROLES:
                raise self._misfit()
            self._fault(aspect, f"has {said!r}, which cannot be the {role} here")
        self.choices.append(Choice(role, said, tuple(options)))
        self.scene.settle(role, said)

    def _is_avoided(self, role: str, said: str) -> bool:
        """Whether the teller merely avoids a word: for its kind, or because somebody is there already."""
        if role not in _NEW_ROLES or (role == "meeting" and "away" in self.scene.roles):
            return False
        words, value = self.scene.contrast(role)
        return said in words and said != value


@cache
def _pattern(slots: tuple[Slot, ...]) -> re.Pattern[str]:
    """Any words in the roles, so that a wrong word is told from a sentence that does not fit."""
    word = {"": "", "time": r"(\w+ \w+)"}
    return re.compile("".join(re.escape(slot.before) + word.get(slot.role, r"(\w+)") for slot in slots))
