"""The grammar's promises that make text and choices one to one."""

import re

import pytest

from data.grammar import ENDINGS, EVENTS, OPENING, Slot, split_template

EVERY = (OPENING, *EVENTS, *ENDINGS.values())


def spoken(slots: tuple[Slot, ...]) -> str:
    word = {"": "", "time": "Two words"}
    return "".join(slot.before + word.get(slot.role, "Word") for slot in slots)


def test_a_template_is_split_at_its_roles():
    assert split_template("{owner} saw {other:her}") == (
        Slot("", "owner", ""),
        Slot(" saw ", "other", "her"),
        Slot("", "", ""),
    )
    assert split_template("It ran.") == (Slot("It ran.", "", ""),)


def test_no_two_events_begin_alike_whatever_words_fill_their_roles():
    beginnings = [spoken(event.slots[0]) for event in EVERY]
    word = {"": "", "time": r"\w+ \w+"}
    patterns = [
        re.compile("".join(re.escape(slot.before) + word.get(slot.role, r"\w+") for slot in event.slots[0]))
        for event in EVERY
    ]
    for index, beginning in enumerate(beginnings):
        assert [number for number, pattern in enumerate(patterns) if pattern.fullmatch(beginning)] == [index]


@pytest.mark.parametrize("event", EVERY, ids=lambda event: event.name)
def test_a_pronoun_never_comes_before_the_name_it_stands_for(event):
    named = set() if event is OPENING else {"owner"}
    for slots in event.slots:
        for slot in slots:
            if slot.form:
                assert slot.role in named
            named.add(slot.role)


@pytest.mark.parametrize("event", EVERY, ids=lambda event: event.name)
def test_sentences_end_with_a_full_stop_and_hold_no_other(event):
    for sentence in event.sentences:
        assert sentence.endswith(".")
        assert sentence.count(".") == 1
