"""The head plan: names, the keys that are tried and their order, the user's keys, stacked heads."""

from typing import Any

import pytest

from composite_losses.errors import CompositeLossError, ConfigError
from composite_losses.heads import Slot, compile_plan
from composite_losses.heads.plan import HeadPlan, head_names

PAIR = (Slot("a"), Slot("b"))
GROUP = (Slot(("agents", "arm", "move")), Slot(("agents", "arm", "grip")), Slot(("agents", "say")))


def stored(plan: HeadPlan) -> list[tuple[Any, ...]]:
    return [head.log_probs for head in plan.heads]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "names"),
    [
        (["a"], ["a"]),
        ([("agents", "a")], ["a"]),
        ([("l", "x"), ("r", "x")], ["l/x", "r/x"]),
        # only what is ambiguous is written out
        ([("l", "x"), ("r", "x"), ("r", "y")], ["l/x", "r/x", "y"]),
        (["x", ("r", "x")], ["x", "r/x"]),
        ([("g", "l", "x"), ("g", "r", "x")], ["g/l/x", "g/r/x"]),
    ],
)
def test_names_are_distinct(actions: list[Any], names: list[str]) -> None:
    """Case 15: the last element of the action key; the path joined with "/" where ambiguous."""
    assert head_names(actions) == names
    assert compile_plan([Slot(action) for action in actions]).names == tuple(names)


# --- candidates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "candidates"),
    [
        ("action", ("action_log_prob", "sample_log_prob")),
        (
            ("agents", "action"),
            (("agents", "action_log_prob"), ("agents", "sample_log_prob"), "sample_log_prob"),
        ),
        (
            ("g", "arm", "x"),
            (("g", "arm", "x_log_prob"), ("g", "arm", "sample_log_prob"), "sample_log_prob"),
        ),
    ],
)
def test_candidates_of_a_single_head(action: Any, candidates: tuple[Any, ...]) -> None:
    """Case 31: ``<action>_log_prob``, then the legacy key beside the action, then at the root."""
    plan = compile_plan([Slot(action)])
    assert stored(plan) == [candidates]
    assert plan.joint == ()  # of one head there is nothing to join


def test_the_users_key_is_tried_first_then_what_the_actor_declares() -> None:
    """Case 10: set key, declared key, default; each once."""
    slot = Slot("action", ("written", "action_log_prob"))
    plan = compile_plan([slot], log_prob="mine")
    assert stored(plan) == [("mine", "written", "action_log_prob", "sample_log_prob")]
    plan = compile_plan([slot], log_prob="action_log_prob")
    assert stored(plan) == [("action_log_prob", "written", "sample_log_prob")]


def test_the_legacy_key_stands_for_no_single_head_of_several() -> None:
    """Case 31: one ``sample_log_prob`` beside two heads is a joint log-prob, not the first's."""
    plan = compile_plan(PAIR)
    assert stored(plan) == [("a_log_prob",), ("b_log_prob",)]
    assert plan.joint == ("sample_log_prob",)


def test_candidates_of_a_joint_log_prob() -> None:
    """Case 7: the set key, what the actor declares, beside the actions, and at the root, once."""
    plan = compile_plan(GROUP, [("agents", "declared")], log_prob=("agents", "mine"))
    assert plan.joint == (
        ("agents", "mine"),
        ("agents", "declared"),
        ("agents", "arm", "sample_log_prob"),
        ("agents", "sample_log_prob"),
        "sample_log_prob",
    )
    # one key for several heads is no head's own
    assert all(("agents", "mine") not in candidates for candidates in stored(plan))


# --- action keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["action", ("agents", "action"), ["a", "b"], ["b", "a"]])
def test_what_renames_nothing(key: Any) -> None:
    """Case 11: one key for a composite actor, as trainers send it, or the keys it has."""
    assert compile_plan(PAIR, action=key) == compile_plan(PAIR)


@pytest.mark.parametrize("key", ["act", ["act"], ("agents", "act"), [("agents", "act")]])
def test_a_single_head_is_renamed(key: Any) -> None:
    """Case 11: the action and its default log-prob move; the actor's own distribution stays."""
    (head,) = compile_plan([Slot("action")], action=key).heads
    bare = key[0] if isinstance(key, list) else key
    assert (head.action, head.slot, head.name) == (bare, "action", "act")
    parts = (bare,) if isinstance(bare, str) else bare
    own = "act_log_prob" if len(parts) == 1 else ("agents", "act_log_prob")
    assert head.log_probs[0] == own


@pytest.mark.parametrize("key", ["action", ["action"], ("action",)])
def test_a_prefix_of_the_only_head_renames_nothing(key: Any) -> None:
    """Case 11: "action" holds ("action", "move"): the entry is found where the actor writes it."""
    slots = [Slot(("action", "move"))]
    assert compile_plan(slots, action=key) == compile_plan(slots)


def test_lists_rename_by_position() -> None:
    """Case 11: keys that are all new are in the actor's order; the names follow them."""
    plan = compile_plan(PAIR, action=["x", ("g", "y")])
    assert [(h.slot, h.action, h.name) for h in plan.heads] == [
        ("a", "x", "x"),
        ("b", ("g", "y"), "y"),
    ]


def test_known_keys_of_a_list_stay_with_their_head() -> None:
    """Case 11: of ["b", "new"], "b" is head b's, so "new" renames a."""
    plan = compile_plan(PAIR, action=["b", "new"])
    assert [(h.slot, h.action) for h in plan.heads] == [("a", "new"), ("b", "b")]


# --- log-prob keys --------------------------------------------------------------------------------


def test_log_prob_lists_pair_with_declared_keys() -> None:
    """Case 10: keys that the actor declares find their heads in whatever order they are given."""
    slots = [Slot("a", ("pa",)), Slot("b", ("pb",))]
    straight = compile_plan(slots, log_prob=["pa", "pb"])
    assert compile_plan(slots, log_prob=["pb", "pa"]) == straight
    assert stored(straight) == [("pa", "a_log_prob"), ("pb", "b_log_prob")]
    assert stored(compile_plan(PAIR, log_prob=["b_log_prob", "a_log_prob"])) == [
        ("a_log_prob",),
        ("b_log_prob",),
    ]


@pytest.mark.parametrize(
    ("action", "first"),
    [
        (None, ["one", "two"]),
        ("action", ["one", "two"]),
        (["a", "b"], ["one", "two"]),
        (["b", "a"], ["two", "one"]),
    ],
)
def test_log_prob_lists_pair_with_the_action_list(action: Any, first: list[str]) -> None:
    """Case 10: unknown keys go by position in the action list, else in the actor's."""
    plan = compile_plan(PAIR, action=action, log_prob=["one", "two"])
    assert [head.log_probs[0] for head in plan.heads] == first


@pytest.mark.parametrize("key", ["one", ["one"], ("g", "one"), [("g", "one")]])
def test_one_log_prob_key(key: Any) -> None:
    """Case 7: of several heads it is joint, of one head its own."""
    bare = key[0] if isinstance(key, list) else key
    plan = compile_plan(PAIR, log_prob=key)
    assert plan.joint[0] == bare
    assert all(bare not in candidates for candidates in stored(plan))
    assert compile_plan([Slot("a")], log_prob=key).heads[0].log_probs[0] == bare


@pytest.mark.parametrize("option", ["action", "log_prob"])
@pytest.mark.parametrize("keys", [["x", "y", "z"], ["w", "x", "y", "z"]])
def test_a_list_of_another_length(option: str, keys: list[str]) -> None:
    """Case 10: an error that says which keyword, both lengths, and the heads."""
    with pytest.raises(ConfigError) as caught:
        compile_plan(PAIR, **{option: keys})
    text = str(caught.value)
    keyword = "sample_log_prob" if option == "log_prob" else "action"
    for piece in (f"set_keys({keyword}=", "2", str(len(keys)), "'a'", "'b'"):
        assert piece in text, piece
    assert isinstance(caught.value, CompositeLossError)
    assert isinstance(caught.value, ValueError)


def test_several_action_keys_for_one_head_are_an_error() -> None:
    """Case 10: a single head has one action."""
    with pytest.raises(ConfigError, match=r"expected one key per head, 1 .*found 2"):
        compile_plan([Slot("a")], action=["x", "y"])


# --- stacked heads --------------------------------------------------------------------------------


def test_columns() -> None:
    """Case 17: a head reads its column; its log-prob is still the head's own."""
    plan = compile_plan(PAIR, columns={"b": (("env", "action"), 1)})
    a, b = plan.heads
    assert (a.action, a.column) == ("a", None)
    assert (b.action, b.column, b.slot, b.name) == (("env", "action"), 1, "b", "b")
    assert b.log_probs == ("b_log_prob",)


@pytest.mark.parametrize("name", ["l/x", ("l", "x")])
def test_columns_of_nested_heads(name: Any) -> None:
    """Case 17: a head is meant by its name or its action key."""
    plan = compile_plan([Slot(("l", "x")), Slot(("r", "x"))], columns={name: ("action", 0)})
    assert [head.column for head in plan.heads] == [0, None]


def test_the_stacked_entry_is_no_ones_name() -> None:
    """Case 17: several heads lie under "action", so "action" names none of them."""
    plan = compile_plan(PAIR, columns={"a": ("action", 0), "b": ("action", 1)})
    assert plan.index("action") is None
    assert [plan.index(name) for name in ("a", "b")] == [0, 1]


@pytest.mark.parametrize(
    ("columns", "pieces"),
    [
        ({"c": ("action", 0)}, ["'c'", "'a'", "'b'"]),
        ({"a": "action"}, ["'a'", "(key, column)", "'action'"]),
        ({"a": ("action", "0")}, ["'a'", "(key, column)"]),
        ({"a": ("action", 0, 1)}, ["'a'", "(key, column)"]),
    ],
)
def test_columns_are_checked(columns: Any, pieces: list[str]) -> None:
    """Case 17: an unknown head, or something that is no (key, column)."""
    with pytest.raises(ConfigError) as caught:
        compile_plan(PAIR, columns=columns)
    for piece in pieces:
        assert piece in str(caught.value), piece


# --- what a head answers to -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "position"),
    [
        ("move", 0),
        (("agents", "arm", "move"), 0),
        (("agents", ("arm", "move")), 0),
        (("agents", "arm", "grip_log_prob"), 1),
        (("agents", "arm", "grip_entropy"), 1),
        (("agents", "said"), 2),
        ("say", 2),
        ("agents", None),
        (("agents", "arm"), None),
        ("move_log_prob", None),
        ("sample_log_prob", None),
    ],
)
def test_index(key: Any, position: int | None) -> None:
    """Case 15: name, action key, TorchRL's two forms, and every key of its log-prob."""
    slots = [*GROUP[:2], Slot(GROUP[2].action, (("agents", "said"),))]
    assert compile_plan(slots).index(key) == position


def test_index_of_a_renamed_head() -> None:
    """Case 15: a renamed head answers to its new key and to the actor's."""
    plan = compile_plan(PAIR, action=["x", "y"])
    for key in ("x", "a", "x_log_prob", "a_entropy"):
        assert plan.index(key) == 0
    for key in ("y", "b"):
        assert plan.index(key) == 1


def test_a_name_goes_before_an_alias() -> None:
    """Case 15: "b" names the head ("g", "b"), though the actor's other head was once called so."""
    plan = compile_plan(PAIR, action=[("g", "b"), "y"])
    assert plan.names == ("b", "y")
    assert plan.index("b") == 0


def test_a_single_head_answers_to_the_legacy_key() -> None:
    """Case 31: beside one head, ``sample_log_prob`` is its log-prob."""
    assert compile_plan([Slot("action")]).index("sample_log_prob") == 0
