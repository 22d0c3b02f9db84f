"""The built-in data: a seeded teller of micro-world stories, and of questions with one exact answer each.

Stories come from the grammar in `data.grammar` by uniform choices, each of which can be read off the text.
So the probability of a story is one over the product of its numbers of options, its information content is
exact, and the best loss that any model can reach on a corpus is known (`entropy_floor`). Nothing is
downloaded, hardly a story comes twice, and a seed gives the same stories on every machine.

    python -m data.microworld --stories 60 --seed 7      # a corpus: stories with an empty line after each
    python -m data.microworld --questions 60 --seed 11   # JSONL: prompt, response, kind
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from data.grammar import ENDINGS, OPENING, PRONOUNS, Event
from data.scene import WORLD, Scene, World

UNANSWERABLE = "The story does not say."
KINDS = ("holder", "object_place", "person_place", "first_place", "quality", "unanswerable")
Option = TypeVar("Option")


class Chooser:
    """The one source of chance; `ways` is the product of the numbers of options, so 1 / P of the choices."""

    def __init__(self, random: Random):
        self.random = random
        self.ways = 1

    def pick(self, options: Sequence[Option]) -> Option:
        """One of `options`, all equally likely (only `Random.random` is promised never to change)."""
        self.ways *= len(options)
        return options[int(self.random.random() * len(options))]


@dataclass(frozen=True, slots=True)
class Story:
    """One line of text, its exact information content in bits, and what is true at its end."""

    text: str
    bits: float
    holder: str
    """"owner", "animal" or "nobody"."""
    roles: Mapping[str, str]
    """Role to value; the roles are explained in `data.grammar`, and `first` is where the story began."""
    held_out: bool = False

    @property
    def people(self) -> dict[str, str]:
        """Person to the place where they are."""
        roles = self.roles
        people = {roles["owner"]: roles["here"]}
        return people | {roles["other"]: roles["away"]} if "other" in roles else people


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a story, its one right answer, and its kind (one of `KINDS`)."""

    text: str
    answer: str
    kind: str


def stories(
    count: int, seed: int, *, held_out: bool = False, lengths: Sequence[int] = (1, 2, 3)
) -> list[Story]:
    """`count` stories with one of `lengths` events each; a longer list begins with the shorter.

    With `held_out`, each begins with a person in the place that no other story ever names with that person.
    """
    random = Random(seed)
    return [tell(Chooser(random), held_out=held_out, lengths=lengths) for _ in range(count)]


def tell(chooser: Chooser, *, held_out: bool, lengths: Sequence[int], world: World = WORLD) -> Story:
    """One story from the chooser's choices."""
    scene = Scene(world, held_out=held_out)
    length = chooser.pick(lengths)
    parts = [_tell_event(OPENING, scene, chooser)]
    for _ in range(length):
        parts.append(_tell_event(chooser.pick(scene.events()), scene, chooser))
    parts.append(_tell_event(ENDINGS[scene.holder], scene, chooser))
    return Story(" ".join(parts), math.log2(chooser.ways), scene.holder, scene.roles, held_out)


def _tell_event(event: Event, scene: Scene, chooser: Chooser) -> str:
    roles, words = scene.roles, []
    for before, role, form in event.passage:
        words.append(before)
        if form:
            words.append(PRONOUNS[scene.world.people[roles[role]]][form])
        elif role:
            if role not in roles:
                scene.settle(role, chooser.pick(scene.options(role)))
            words.append(roles[role])
    scene.finish(event)
    return "".join(words)


def entropy_floor(told: Iterable[Story]) -> float:
    """Bits per byte that no model can beat on average: all bits over all bytes, one separator byte per story.

    Exact for models that see one story per row and predict its text and the newline after it.
    """
    told = list(told)
    return sum(story.bits for story in told) / sum(len(story.text.encode()) + 1 for story in told)


def questions(story: Story) -> list[Question]:
    """Every question with an exact answer, then every one about a person or object not in the story.

    An answer is a sentence that begins with what was asked about: a model must then take that from the
    question, which it otherwise never learns to read (docs/log.md).
    """
    roles, people = story.roles, story.people
    held = story.holder == "owner"
    holder = roles["owner"] if held else f"the {roles['animal']}" if story.holder == "animal" else "nobody"
    known = _about_object(roles["object"], holder, roles["here" if held else "spot"], roles["quality"])
    if "object2" in roles:
        trader = roles["trader"]
        known += _about_object(roles["object2"], trader, people[trader], roles["quality2"])
    for person, place in people.items():
        known.append(Question(f"Where is {person} now?", f"{person} is in the {place}.", "person_place"))
    hero, first = roles["hero"], roles["first"]
    known.append(Question(f"Where was {hero} first?", f"{hero} was in the {first}.", "first_place"))

    absent: list[str] = []
    for name in WORLD.people:
        if name not in people:
            absent += (f"Where is {name} now?", f"Where was {name} first?")
    for thing in WORLD.objects:
        if thing not in (roles["object"], roles.get("object2")):
            absent += (question.text for question in _about_object(thing, "", "", ""))
    return known + [Question(text, UNANSWERABLE, "unanswerable") for text in absent]


def _about_object(thing: str, holder: str, place: str, quality: str) -> list[Question]:
    return [
        Question(f"Who has the {thing} now?", f"The {thing} is with {holder}.", "holder"),
        Question(f"Where is the {thing} now?", f"The {thing} is in the {place}.", "object_place"),
        Question(f"What was the {thing} like?", f"The {thing} was {quality}.", "quality"),
    ]


def instructions(
    count: int, seed: int, *, held_out_share: float = 0.1, lengths: Sequence[int] = (1, 2)
) -> list[dict[str, Any]]:
    """`count` distinct records {"prompt", "response", "kind", "held_out"}, each kind equally often.

    A prompt is a story and a question about it; stories have one or two events, to keep prompts short. About
    `held_out_share` of them are held-out stories, marked: leave these out of what a model is trained on.
    """
    random = Random(seed)
    records: dict[str, dict[str, Any]] = {}
    while len(records) < count:
        held_out = random.random() < held_out_share
        chooser = Chooser(random)
        story = tell(chooser, held_out=held_out, lengths=lengths)
        kind = KINDS[len(records) % len(KINDS)]
        question = chooser.pick([asked for asked in questions(story) if asked.kind == kind])
        prompt = f"{story.text} {question.text}"
        record = {"prompt": prompt, "response": question.answer, "kind": kind, "held_out": held_out}
        records.setdefault(prompt, record)
    return list(records.values())


def corpus_text(told: Iterable[Story]) -> str:
    """A corpus: every story followed by an empty line."""
    return "".join(f"{story.text}\n\n" for story in told)


def instructions_jsonl(records: Iterable[Mapping[str, Any]]) -> str:
    """Training records as JSONL, with the keys prompt, response and kind."""
    keys = ("prompt", "response", "kind")
    kept = ({key: record[key] for key in keys} for record in records)
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a corpus or training questions to standard output."""
    parser = argparse.ArgumentParser(prog="python -m data.microworld", description=main.__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stories", type=int, metavar="N", help="write a corpus of N stories")
    what.add_argument("--questions", type=int, metavar="N", help="write N questions as JSONL")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="same seed, same bytes (default 7)")
    chosen = parser.parse_args(arguments)
    if chosen.stories is not None:
        text = corpus_text(stories(chosen.stories, chosen.seed))
    else:
        text = instructions_jsonl(instructions(chosen.questions, chosen.seed, held_out_share=0))
    sys.stdout.buffer.write(text.encode())


if __name__ == "__main__":
    main()
