"""The teller: exact probabilities, held-out pairs, right answers, and the same bytes everywhere."""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from data.grading import StoryReader
from data.microworld import (
    KINDS,
    UNANSWERABLE,
    Chooser,
    Story,
    corpus_text,
    entropy_floor,
    instructions,
    instructions_jsonl,
    main,
    questions,
    stories,
    tell,
)
from data.scene import WORLD, Scene, World

DATA = Path(__file__).parents[2] / "data"
SMALL = World(
    people={"Zoë": "she", "Ida": "she", "Ben": "he", "Tom": "he"},
    places=dict.fromkeys(("mill", "barn", "hall"), "inside")
    | dict.fromkeys(("cave", "yard", "park"), "outside"),
    objects={"kite": "toy", "drum": "tool"},
    qualities=("red",),
    animals=("goat",),
    feelings=("sad",),
    times=("cold day",),
    never={"Zoë": "mill", "Ida": "barn", "Ben": "yard", "Tom": "park"},
)


class Recorder(Chooser):
    """Remembers what was chosen, and from what, in the reader's words."""

    def __init__(self, random: Random):
        super().__init__(random)
        self.choices: list[tuple[str, tuple[str, ...]]] = []

    def pick(self, options):
        value = super().pick(options)
        self.choices.append((getattr(value, "name", value), tuple(getattr(o, "name", o) for o in options)))
        return value


class Enumerator(Chooser):
    """Goes through every sequence of choices there is, one story after the other."""

    def __init__(self):
        super().__init__(Random(0))
        self.path: list[tuple[int, int]] = []

    def pick(self, options):
        self.ways *= len(options)
        if self.depth == len(self.path):
            self.path.append((0, len(options)))
        self.depth += 1
        return options[self.path[self.depth - 1][0]]

    def all_stories(self, **settings):
        while True:
            self.ways, self.depth = 1, 0
            yield tell(self, **settings), self.ways
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return
            index, count = self.path.pop()
            self.path.append((index + 1, count))


def told(body: str) -> Story:
    """A story written by hand, with the facts a reader takes from it."""
    text = f"One cold evening Zoë was in the mill. She had a red kite. {body}"
    reader = StoryReader(text, Scene(WORLD))
    reader.read()
    assert not reader.faults
    return Story(text, 0.0, reader.scene.holder, reader.scene.roles)


def test_probabilities_of_all_stories_of_a_small_world_sum_to_one_and_no_text_comes_twice():
    for held_out in (False, True):
        lengths = (1,) if held_out else (1, 2)
        everything = list(Enumerator().all_stories(held_out=held_out, lengths=lengths, world=SMALL))
        texts = [story.text for story, _ in everything]
        assert len(set(texts)) == len(texts) > 100
        assert sum(Fraction(1, ways) for _, ways in everything) == 1
        assert all(story.bits == math.log2(ways) for story, ways in everything)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_text_gives_back_every_choice_and_so_its_bits(held_out):
    random = Random(3)
    for _ in range(800):
        recorder = Recorder(random)
        story = tell(recorder, held_out=held_out, lengths=(1, 2, 3))
        reader = StoryReader(story.text, Scene(WORLD, held_out=held_out))
        reader.read()
        read = [(choice.value, choice.options) for choice in reader.choices]
        length, *rest = recorder.choices
        assert read == rest
        assert length == (sum(choice.role == "event" for choice in reader.choices), (1, 2, 3))
        assert story.bits == math.log2(3 * math.prod(len(options) for _, options in read))
        assert (reader.scene.roles, reader.scene.holder) == (story.roles, story.holder)


def test_each_option_is_equally_likely():
    chooser = Chooser(Random(1))
    counts = Counter(chooser.pick("abc") for _ in range(3000))
    assert chooser.ways == 3**3000
    # Standard deviation of each count is 26.
    assert all(abs(counts[option] - 1000) < 120 for option in "abc")


def test_the_floor_is_all_bits_over_all_bytes_with_one_separator_each():
    assert entropy_floor([Story("Zoë", 6.0, "owner", {}), Story("a", 1.0, "owner", {})]) == 7 / (5 + 2)


def test_twenty_thousand_stories_are_quick_distinct_and_near_an_eighth_of_a_bit_per_byte():
    start = time.process_time()
    many = stories(20_000, 7)
    assert time.process_time() - start < 6, "about 1 s on an idle core"
    assert len({story.text for story in many}) > 19_990
    sizes = [len(story.text.encode()) for story in many]
    assert 5e6 < sum(sizes) < 6e6
    assert min(sizes) >= 120
    assert max(sizes) <= 430
    assert 0.112 < entropy_floor(many) < 0.125


def test_the_first_story_of_a_seed_is_fixed_for_ever():
    (story,) = stories(1, 7)
    assert story.text == (
        "One rainy evening Kofi was in the kitchen. He had a new key. "
        "Kofi left the kitchen and took the key to the park. In the park he felt happy. "
        "In the end Kofi had the new key in the park."
    )
    # length, time, owner, here, quality, object, event, there, feeling
    assert story.bits == math.log2(3 * 8 * 16 * 9 * 8 * 12 * 6 * 5 * 6)


def test_a_longer_list_begins_with_the_shorter_and_another_seed_differs():
    assert stories(50, 4)[:20] == stories(20, 4)
    assert instructions(50, 4)[:20] == instructions(20, 4)
    assert stories(20, 4) != stories(20, 5)
    assert stories(0, 4) == []


@pytest.mark.parametrize("what", ["--stories", "--questions"])
def test_hash_order_changes_nothing(what):
    def output(hash_seed: str) -> bytes:
        command = [sys.executable, "-m", "data.microworld", what, "40", "--seed", "3"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONIOENCODING": "ascii"}
        return subprocess.run(
            command, cwd=DATA.parent, env=environment, capture_output=True, check=True
        ).stdout

    expected = corpus_text(stories(40, 3)) if what == "--stories" else None
    first = output("0")
    assert first == output("12345")
    assert expected is None or first == expected.encode()


def test_a_story_is_one_line_and_a_corpus_puts_an_empty_line_after_each():
    three = stories(3, 1)
    assert all("\n" not in story.text for story in three)
    assert corpus_text(three).split("\n\n") == [*(story.text for story in three), ""]


def test_no_training_story_names_a_person_and_the_place_held_out_for_them():
    for story in stories(3000, 2):
        words = set(re.findall(r"\w+", story.text))
        assert not [name for name, place in WORLD.never.items() if {name, place} <= words]


def test_every_held_out_story_begins_with_a_held_out_pair():
    for story in stories(500, 2, held_out=True):
        name, place = re.match(r"One \w+ \w+ (\w+) was in the (\w+)\.", story.text).groups()
        assert WORLD.never[name] == place
        assert story.held_out


def test_questions_about_a_held_object():
    answers = {q.text: (q.answer, q.kind) for q in questions(told(
        "Zoë left the mill and met Ben in the cave. Zoë gave him the red kite, and Ben felt sad. "
        "Ben left the cave and took the kite to the park. In the park he felt glad. "
        "In the end Ben had the red kite in the park."
    ))}  # fmt: skip
    assert answers["Who has the kite now?"] == ("The kite is with Ben.", "holder")
    assert answers["Where is the kite now?"] == ("The kite is in the park.", "object_place")
    assert answers["Where is Ben now?"] == ("Ben is in the park.", "person_place")
    assert answers["Where is Zoë now?"] == ("Zoë is in the cave.", "person_place")
    assert answers["Where was Zoë first?"] == ("Zoë was in the mill.", "first_place")
    assert answers["What was the kite like?"] == ("The kite was red.", "quality")
    assert answers["Where is Kofi now?"] == (UNANSWERABLE, "unanswerable")
    assert answers["Who has the drum now?"] == (UNANSWERABLE, "unanswerable")
    assert "Where was Ben first?" not in answers, "the story does not show where Ben came from"


def test_questions_about_an_object_that_nobody_or_an_animal_has():
    hidden = "Zoë hid the red kite in the cave. Then she went back to the mill and felt sad. "
    answers = {
        q.text: q.answer for q in questions(told(hidden + "In the end Zoë's red kite was in the cave."))
    }
    assert answers["Who has the kite now?"] == "The kite is with nobody."
    assert answers["Where is the kite now?"] == "The kite is in the cave."
    assert answers["Where is Zoë now?"] == "Zoë is in the mill."
    carried = (
        "The goat found the red kite in the cave. Then the goat took it to the yard. "
        "In the end the goat had Zoë's red kite in the yard."
    )
    answers = {q.text: q.answer for q in questions(told(hidden + carried))}
    assert answers["Who has the kite now?"] == "The kite is with the goat."
    assert answers["Where is the kite now?"] == "The kite is in the yard."


def test_a_traded_object_is_where_its_new_owner_is():
    story = told(
        "Zoë saw Ben come to the mill with a new drum. Zoë took the new drum and gave him the red kite. "
        "Ben left the mill and took the kite to the park. In the park he felt glad. "
        "The cat took the kite from Ben in the park. It ran to the yard, and Ben felt sad. "
        "In the end the cat had Ben's red kite in the yard."
    )
    answers = {q.text: q.answer for q in questions(story)}
    assert answers["Who has the drum now?"] == "The drum is with Zoë."
    assert answers["Where is the drum now?"] == "The drum is in the mill."
    assert answers["What was the drum like?"] == "The drum was new."


def test_every_kind_can_be_asked_of_every_story_and_no_question_has_two_answers():
    for story in stories(300, 6):
        asked = questions(story)
        assert {question.kind for question in asked} == set(KINDS)
        assert len({question.text for question in asked}) == len(asked)


def test_instructions_are_distinct_balanced_and_short_with_held_out_stories_marked():
    records = instructions(1200, 5)
    assert len({(record["prompt"], record["response"]) for record in records}) == 1200
    assert Counter(record["kind"] for record in records) == dict.fromkeys(KINDS, 200)
    # Standard deviation 10.4.
    assert 80 < sum(record["held_out"] for record in records) < 160
    for record in records:
        words = set(re.findall(r"\w+", record["prompt"].rpartition(". ")[0]))
        assert record["held_out"] == any({name, place} <= words for name, place in WORLD.never.items())
        assert record["prompt"].count(". ") in (5, 7), "2 sentences of opening, 2 an event, 1 of ending"
        assert len(record["prompt"].encode()) < 360


@pytest.mark.parametrize(("share", "expected"), [(0, {False}), (1, {True})])
def test_the_share_of_held_out_instructions_is_yours(share, expected):
    assert {record["held_out"] for record in instructions(60, 5, held_out_share=share)} == expected


def test_answers_agree_with_a_plain_look_at_the_text():
    for record in instructions(1200, 8):
        story, question = re.fullmatch(r"(.*\.) (.*\?)", record["prompt"]).groups()
        asked = re.fullmatch(r"(?:Who has|(?:Where|What) (?:is|was)) (.+) (?:now|first|like)\?", question)[1]
        name = asked.removeprefix("the ")
        if re.search(rf"\b{name}\b", story) is None:
            assert record["response"] == UNANSWERABLE
            continue
        assert record["response"].startswith(f"{asked[0].upper()}{asked[1:]} ")
        match record["kind"]:
            case "quality":
                quality = record["response"].removeprefix(f"The {name} was ").removesuffix(".")
                assert f" a {quality} {name}." in story
            case "first_place":
                assert f" {record['response']}" in story


def test_jsonl_has_a_record_a_line_with_the_letters_themselves():
    records = instructions(200, 2)
    lines = instructions_jsonl(records).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [record["prompt"] for record in records]
    assert {tuple(json.loads(line)) for line in lines} == {("prompt", "response", "kind")}
    assert "Łucja" in "".join(lines)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("pretraining/tiny_corpus.txt", ["--stories", "60", "--seed", "7"]),
        ("post_training/tiny_instructions.jsonl", ["--questions", "60", "--seed", "11"]),
    ],
)
def test_the_shipped_samples_are_what_the_command_writes(path, arguments, capfdbinary):
    main(arguments)
    assert capfdbinary.readouterr().out == (DATA / path).read_bytes()


def test_the_command_wants_stories_or_questions(capsys):
    with pytest.raises(SystemExit):
        main(["--seed", "3"])
    assert "--stories --questions" in capsys.readouterr().err
