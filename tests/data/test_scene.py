"""The state between events: who can come in, where one can go, what can happen next."""

import unicodedata
from collections import Counter

import pytest

from data.grammar import ENDINGS, EVENTS
from data.scene import WORLD, Scene


def scene(holder: str = "owner", *, held_out: bool = False, **roles: str) -> Scene:
    made = Scene(WORLD, held_out=held_out)
    made.holder = holder
    for role, value in roles.items():
        made.settle(role, value)
    return made


def test_a_tenth_of_the_pairs_is_held_out_one_for_each_person():
    assert set(WORLD.never) == set(WORLD.people)
    assert set(WORLD.never.values()) == set(WORLD.places)
    assert len(WORLD.never) * 10 == len(WORLD.people) * len(WORLD.places)


def test_words_are_distinct_composed_unicode_and_some_names_are_not_ascii():
    words = [*WORLD.people, *WORLD.places, *WORLD.objects, *WORLD.qualities, *WORLD.animals, *WORLD.feelings]
    assert len(set(words)) == len(words)
    assert all(unicodedata.is_normalized("NFC", word) for word in words)
    assert sum(not name.isascii() for name in WORLD.people) >= 4


def test_company_tells_whether_the_second_person_is_here():
    assert scene(owner="Zoë", here="mill").company == "alone"
    assert scene(owner="Zoë", here="mill", other="Ben", away="cave").company == "apart"
    assert scene(owner="Zoë", here="mill", other="Ben", away="mill").company == "together"


@pytest.mark.parametrize("holder", ENDINGS)
@pytest.mark.parametrize("traded", [False, True])
@pytest.mark.parametrize("away", [None, "cave", "mill"])
def test_something_can_always_happen(holder, traded, away):
    roles = {"owner": "Zoë", "here": "mill"}
    roles |= {"other": "Ben", "away": away} if away else {}
    roles |= {"object2": "drum"} if traded else {}
    assert scene(holder, **roles).events()


def test_a_trade_happens_once_at_most():
    def names(made: Scene) -> set[str]:
        return {event.name for event in made.events()}

    alone = {"owner": "Zoë", "here": "mill"}
    assert names(scene(**alone)) - names(scene(**alone, object2="drum")) == {"trade"}


def test_a_new_place_is_empty_and_held_out_for_nobody_in_the_story():
    made = scene("animal", owner="Zoë", here="mill", other="Ben", away="cave", spot="park")
    barred = {"mill", "cave", "park", WORLD.never["Zoë"], WORLD.never["Ben"]}
    inside = {place for place, kind in WORLD.places.items() if kind == "inside"}
    assert set(made.options("there")) == inside - barred, "the object is in the park, so outside"
    assert set(made.options("meeting")) == {"cave"}, "the other is met where they are"


def test_the_spot_is_free_again_once_the_owner_has_the_object():
    made = scene("nobody", owner="Zoë", here="mill", other="Ben", spot="cave", quality="red", object="kite")
    assert "park" not in made.options("there")
    made.finish(next(event for event in EVENTS if event.name == "return"))
    assert made.holder == "owner"
    assert {"cave", "park"} <= set(made.options("there"))


def test_nobody_comes_in_for_whom_a_place_of_the_story_is_held_out():
    made = scene(owner="Zoë", here="mill", there="cave")
    absent = {name for name, place in WORLD.never.items() if place in ("mill", "cave")}
    assert absent
    assert set(made.options("other")) == {n for n, kind in WORLD.people.items() if kind == "he"} - absent


def test_only_a_held_out_story_begins_in_the_place_held_out():
    place = WORLD.never["Zoë"]
    assert set(scene(owner="Zoë").options("here")) == set(WORLD.places) - {place}
    assert list(scene(owner="Zoë", held_out=True).options("here")) == [place]


def test_two_objects_of_a_story_are_a_toy_and_a_tool():
    tools = scene(object="kite").options("object2")
    assert len(tools) == 6
    assert {WORLD.objects[thing] for thing in tools} == {"tool"}
    assert WORLD.objects["kite"] == "toy"


def test_there_is_always_a_place_to_go():
    """At most four of a kind are barred: two held out, and where the owner and the other are."""
    assert set(Counter(WORLD.places.values()).values()) == {5}


def test_a_role_that_is_never_chosen_is_refused():
    with pytest.raises(KeyError, match="spot"):
        scene(owner="Zoë").options("spot")
