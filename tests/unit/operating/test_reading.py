"""``ls``, ``show`` and ``line``: who holds what, in words and as JSON."""

import re
from pathlib import Path

import pytest

from celery_dislock import SingletonTask
from celery_dislock.config.terms import Rate
from celery_dislock.exceptions import StoreError
from celery_dislock.keys.names import reserved_lock
from celery_dislock.operating.cli import dislock as group
from celery_dislock.operating.cli.table import width_of
from celery_dislock.servers.overrides import RateState
from tests.commands import AWAY, FOUND
from tests.staged import RESERVED, holder, lock, place
from tests.unit.operating.examining import told_in

TEXTS = Path(__file__).parent / "texts"
OF_BEAT = {"task": None, "id": None, "thread": "beat"}
HELD = 750.0  # seconds


def rows(answer):
    """Return the keys of a table, in order."""
    return [row.split()[0] for row in answer.stdout.splitlines()[1:]]


@pytest.fixture
def all_of_it(server):
    """A lock of which everything is known that there is, and others."""
    of_turn = {"task": None, "worker": None, "pid": None, "host": None, "renewed": None}
    holders = [
        holder(1, held=HELD),
        holder(2, mode="shared", renewed=None),
        holder(3, expiring=True, renewed=None),
        holder(4, turn=True, **of_turn),
        holder(5, thread="MainThread", task=None, id=None),
        holder(6, renewed=25.0, remaining=5.0),
    ]
    limit = {"limit": 0, "limit_age": 7200.0, "limit_note": "by ann: deploy"}
    server.put(
        lock(
            "all",
            holders=holders,
            waiting=3,
            line=[place(1), place(2, parked=False, ticket="", task=None, thread="main")],
            turns=[place(0, turns=2)],
            aside=2,
            reservation=RESERVED,
            limit_remaining=60.0,
            **limit,
        ),
        lock("kept", limit=3, reservation=RESERVED._replace(state="ended")),
        lock(
            "beat",
            holders=[holder(**OF_BEAT)],
            ticked=90.0,
            waiting=1,
            line=[place(parked=False, ticket="", **OF_BEAT)],
        ),
        lock("led by nobody", ticked=90.0),
    )


@pytest.mark.parametrize("words", ["show all", "show kept", "show beat", "ls", "line all"])
def test_all_that_is_known_is_told(dislock, all_of_it, words):
    """As it stands in a file beside this one: each kind of lease, line, limit and reservation."""
    answer = dislock(*words.split())
    assert answer.exit_code == 0
    assert answer.stdout == (TEXTS / f"{words.replace(' ', '-')}.txt").read_text("utf-8")
    assert answer.stderr == ""
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_a_word_that_is_longer_than_a_line_stays_whole(dislock, server):
    """A key, an owner or a command may be copied from it."""
    server.put(lock("k" * 90, holders=[holder(owner="o" * 90)]))
    told = dislock("show", "k" * 90).stdout
    assert f"lock\n    {'k' * 90}\n" in told
    assert f" {'o' * 90}\n" in told


def test_a_holder_is_told_for_whose_end_a_newer_task_waits(dislock, server):
    """With the id of the newer one; as JSON it stands beside the rest, null where none waits."""
    server.put(lock("deploy", holders=[holder(1, superseded="id-2"), holder(3)]))
    told = dislock("show", "deploy").stdout
    assert told.count("newer ") == 1
    assert "\n    newer     task id-2, which waits for this one to end\n" in told
    holders = dislock.json("show", "deploy")["holders"]
    assert [one["superseded"] for one in holders] == ["id-2", None]


LARGE = place(1, cost=3, limit=5)
ROOM = "the first in line needs 3 of 5 units, and 2 are free: nobody passes it"


BY_TICKET = "the first in line goes by {}, as its ticket says"


def test_costs_are_told(dislock, server):
    """Of those who hold and of those who wait, and what the first in line lacks."""
    small = place(2, limit=5)
    spent = [holder(1, cost=2, spent=9), holder(2)]
    server.put(lock("k", holders=spent, waiting=2, line=[LARGE, small]))
    told = " ".join(dislock("show", "k").stdout.split())
    assert told.count(" cost 2, spent 9 ") == told.count(" cost ") - 1 == 1
    words = BY_TICKET.format("5 at a time")
    assert f" {words} 2 in line; {ROOM} 1. shop.pay[parked-1], for 5.0 s, cost 3, parked" in told
    answer = dislock("line", "k", env={"COLUMNS": "200"})
    assert [re.split("  +", row)[5] for row in answer.stdout.splitlines()] == ["COST", "3", "1"]
    assert answer.stderr == f"{words}\n{ROOM}\n"
    assert "  2 leases, cost 3: shop.export" in dislock("ls", env={"COLUMNS": "200"}).stdout
    known = dislock.json("show", "k")
    assert {(lease["cost"], lease["spent"]) for lease in known["holders"]} == {(1, None), (2, 9)}
    assert [(waiter["cost"], waiter["limit"]) for waiter in known["line"]] == [(3, 5), (1, 5)]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, ROOM),
        ({"line": [LARGE._replace(cost=2, place=1)]}, ""),
        ({"line": [LARGE._replace(cost=1)], "holders": [holder(1, cost=5)]}, ""),
        ({"limit": 6}, ""),
        ({"limit": 2}, ROOM.replace("3 of 5", "2 of 2").replace("2 are", "0 are")),
        ({"limit": 0}, ""),
        ({"line": [LARGE._replace(limit=None)]}, ""),
        ({"holders": [holder(1, cost=4)]}, ROOM.replace("2 are", "1 is")),
        ({"holders": [holder(n, mode="shared") for n in (1, 2, 3)]}, ""),
        ({"line": [LARGE._replace(mode="shared")]}, ""),
    ],
    ids=str,
)
def test_what_the_first_in_line_lacks_is_units(server, more, told):
    """The leases count by their costs, of the code's limit or an operator's in its place."""
    about = {"holders": [holder(1, cost=2), holder(2)], "line": [LARGE], **more}
    server.put(lock("k", waiting=2, **about))
    assert server.overview.lock("dislock:{k}").lack == told
    assert server.overview.lock("dislock:{k}", 1).lack == ""


MINUTE = Rate(100, 60.0)
OF_CODE = RateState(MINUTE, 0.0)
PARKED = place(parked=True, limit=3)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, BY_TICKET.format("3 at a time")),
        ({"rate": OF_CODE}, BY_TICKET.format("3 at a time and 100 a minute")),
        ({"rate": OF_CODE, "limit": 2}, BY_TICKET.format("100 a minute")),
        ({"rate": OF_CODE._replace(is_set=True)}, BY_TICKET.format("3 at a time")),
        ({"line": [PARKED._replace(limit=None)]}, BY_TICKET.format("any number at a time")),
        (
            {"line": [PARKED._replace(parked=False)]},
            "the first in line goes by 3 at a time, as its code says",
        ),
        ({"limit": 2}, ""),
        ({"line": [PARKED._replace(limit=1)]}, ""),
        ({"line": [PARKED._replace(mode="shared")]}, ""),
        ({"line": []}, ""),
    ],
    ids=str,
)
def test_whose_word_the_terms_are_is_told(server, more, told):
    """Of what holds for the first in line and is not as by default; an operator's stands alone."""
    server.put(lock("k", waiting=1, **{"line": [PARKED], **more}))
    assert server.overview.lock("dislock:{k}").words == told
    assert server.overview.lock("dislock:{k}", 1).words == ""


def test_what_nobody_leads_or_holds_is_told(dislock, all_of_it):
    """A beat's lock as such; a key that nobody knows is a finding, also if it is misspelt."""
    assert "  led by nobody\n  last tick 90 s ago\n" in dislock("show", "led by nobody").stdout
    answer = dislock("show", "nothing")
    assert (answer.exit_code, answer.stdout) == (FOUND, "lock nothing\n  held by nobody\n")


def test_what_is_in_trouble_comes_first_and_says_so(dislock, server):
    """The worst on top, then by key, with since when; as JSON by name, as `show` has it, too."""
    server.put(
        lock("a", holders=[holder()]),
        lock("b", limit=0, limit_age=7200.0, waiting=2),
        lock("c", aside=1),
        lock("d", waiting=2, line=[place(parked=False, ticket="", waiting=9.0)]),
        lock("e", holders=[holder(), holder(2, renewed=25.0, remaining=5.0)], aside=1),
        lock("gone"),
    )
    server.damage("f")
    answer = dislock("ls")
    assert rows(answer) == list("fedcba")
    troubles = [row[5:28].strip() for row in answer.stdout.splitlines()[1:]]
    assert troubles == [
        *(
            *("damaged", "overdue 25 s, set aside", "stuck 9.0 s", "set aside"),
            *("paused 2 h 00 min", "-"),
        )
    ]
    told = dislock.json("ls")
    assert [one.get("troubles") for one in told[1:3]] == [["overdue", "set aside"], ["stuck"]]
    assert dislock.json("show", "e")["troubles"] == told[1]["troubles"]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ([], ["a", "b"]),
        (["a*"], ["a"]),
        (["--held-for", f"{HELD:g}"], ["a"]),
        (["--held-for", "1h"], []),
        (["--task", "shop.mail"], ["b"]),
        (["--task", "shop.*"], ["a", "b"]),
        (["--worker", "celery@w2"], ["b"]),
    ],
)
def test_locks_are_chosen(dislock, server, options, keys):
    """By key, by how long they are held, by which task, and where."""
    server.put(
        lock("a", holders=[holder(held=HELD)]),
        lock("b", holders=[holder(held=HELD - 1, task="shop.mail", worker="celery@w2")]),
    )
    answer = dislock("ls", *options)
    assert rows(answer) == keys
    assert answer.stderr == ("" if keys else "No lock matches.\n")


def test_keys_that_are_reserved_together(dislock, server):
    """A task with several keys reserves all of them under one name, which is shown, too."""

    @dislock.app.task(base=SingletonTask, name="shop.move", lock_key=["a", "b"], shared=False)
    def move(): ...

    assert dislock("show", "--task", "shop.move").exit_code == FOUND
    name = reserved_lock(["dislock:{a}", "dislock:{b}"])
    server.put(lock("a and others", name=name, reservation=RESERVED))
    answer = dislock("show", "--task", "shop.move")
    assert answer.exit_code == 0
    assert "lock a and others\n  held by nobody\n  reserved 3.0 s ago" in answer.stdout
    told = dislock.json("show", "--task", "shop.move")
    assert [one["key"] for one in told] == ["a", "b", "a and others"]


def test_a_line_is_read_in_pages(dislock, server):
    """Places are counted from 1 on the command line; nobody in line is a finding."""
    line = [place(number, args="x" * 99) for number in (1, 2, 3)]
    server.put(lock(waiting=9, line=[*line, place(4, parked=False, ticket="")]))
    answer = dislock("line", "k", "--first", "3", "--most", "2")
    assert rows(answer) == ["3", "4"]
    assert answer.stderr == "9 in line; go on with --first 5\n"
    assert dislock("line", "other").exit_code == FOUND
    nobody = {"key": "other", "waiting": 0, "turns": [], "line": [], "rate": None}
    assert dislock.json("line", "other") == nobody


EARLY = RateState(MINUTE, 12.0)
BY_ANA = {"note": "by ana: 429", "age": 7200.0}
BACK = RateState(None, 0.0, held_back=90.0)
TOLD = told_in("rates.txt")


RATES = {
    "the code's": {"rate": OF_CODE},
    "too early": {"rate": EARLY},
    "of people": {"rate": OF_CODE._replace(is_set=True, **BY_ANA), "limit": 2},
    "of people, too early": {"rate": EARLY._replace(is_set=True, remaining=90.0, **BY_ANA)},
    "held back": {"rate": BACK._replace(back_note="by ana: 429", age=7200.0)},
    "of people, held back": {"rate": BACK._replace(rate=MINUTE, is_set=True, **BY_ANA)},
}


@pytest.mark.parametrize("case", RATES)
def test_how_often_a_lock_is_taken_is_told(dislock, server, case):
    """What people have set as what the code says; beside the line, too; `ls` says why it waits."""
    given = RATES[case]
    server.put(lock(**given, waiting=1, line=[place(parked=False, ticket="", waiting=3.0)]))
    lines = dislock("show", "k").stdout.replace("\n      ", " ").splitlines()
    shown = [one.strip() for one in lines if one.startswith(("  rate", "  held back"))]
    remarks = dislock("line", "k").stderr.splitlines()
    assert [one for one in remarks if not one.startswith("the first in line goes by")] == shown
    row = dislock("ls", env={"COLUMNS": "200"}).stdout.splitlines()[1]
    assert [*shown, " | ".join(re.split("  +", row))] == TOLD[case]
    for known in (*dislock.json("ls"), dislock.json("show", "k"), dislock.json("line", "k")):
        rate = known["rate"]
        is_known = given["rate"].rate is not None
        assert rate["rate"] == ({"most": 100, "window": 60.0} if is_known else None)
        assert round(rate["held_back"]) == given["rate"].held_back


@pytest.mark.parametrize(
    ("given", "keys"),
    [({}, []), ({"early": 12.0}, ["k"]), ({"is_set": True}, ["k"]), ({"held_back": 5.0}, ["k"])],
)
def test_a_lock_that_may_be_taken_now_is_not_listed_for_its_rate(dislock, server, given, keys):
    """There may be thousands that were taken within a day; `show` tells the rate nevertheless."""
    server.put(lock(rate=OF_CODE._replace(**given)))
    assert rows(dislock("ls")) == keys
    assert dislock("show", "k").exit_code == 0
    for more in ({"holders": [holder()]}, {"aside": 1}, {"limit": 3}):
        server.put(lock(rate=OF_CODE._replace(**given), **more))
        assert rows(dislock("ls")) == ["k"]


HOSTILE = "[red]x[/red]\x1b[31m\n"
KEYS = ["k" * 160, "\u4e2d\u6587" * 25, "\U0001f512" * 30, HOSTILE * 9, "[b]\x1b[m\n", "export:7"]


@pytest.mark.parametrize("asked", [["ls"], ["line", "export:7"]])
def test_a_row_is_a_line_of_80_columns_of_text(dislock, server, asked):
    """Whatever is in the keys and names of strangers."""
    task_id = "9b1d0c5e-77aa-4c3e-9d2b-0123456789ab"
    who = {"id": task_id, "task": "[link=x]t[/link]", "worker": "celery@worker-1.example.com"}
    parked = place(task=HOSTILE * 20, args="\u4e2d" * 90, routing_key=HOSTILE)
    server.put(*(lock(key, holders=[holder(**who)], line=[parked], waiting=1) for key in KEYS))
    printed = dislock(*asked).stdout
    lines = printed.splitlines()
    head = next(nth for nth, line in enumerate(lines) if line.startswith(("KEY ", "PLACE ")))
    assert len(lines) - head - 1 == (1 if asked[0] == "line" else len(KEYS))
    assert max(map(width_of, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert task_id not in printed
    if asked[0] != "line":
        assert "[b]\\x1b[m\\n " in printed
        assert "[link=x]t[/link]" in printed
    assert task_id in dislock("show", "export:7").stdout
    assert dislock.json("ls")[0]["holders"][0]["id"] == task_id


def test_errors_have_their_exit_codes(dislock, server):
    """A server that is away is no finding, and a damaged lock is one."""
    server.damage("k")
    answer = dislock("show", "k")
    assert answer.exit_code == FOUND
    assert "cannot be used: WRONGTYPE" in answer.stderr
    for command in ("ls", "show k", "line k", "free k", "pause k", "drop id"):
        server.error = StoreError("redis://fake", "away")
        answer = dislock(*command.split())
        assert (answer.exit_code, answer.stderr) == (
            AWAY,
            "Error: lock server redis://fake: away\n",
        )


def test_an_encoding_without_a_key_s_characters_ends_no_command(dislock, server):
    """They are written as Python writes them."""
    server.put(lock("\u4e2d", holders=[holder()]))
    answer = dislock("ls", charset="latin-1")
    assert answer.exit_code == 0
    assert "\\u4e2d" in answer.stdout


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_help_of_no_command_is_cut(dislock, width):
    """Each command is described by a whole sentence, which is a line of 80 columns."""
    words = " ".join(dislock("--help", terminal_width=width).stdout.split())
    assert "..." not in words.partition("Commands:")[2]
    for name, command in group.commands.items():
        short = command.get_short_help_str()
        assert short.endswith("."), name
        assert f"{name} {' '.join(short.split())}" in words
        assert len(short) <= 80 - len("  put-back  "), name
