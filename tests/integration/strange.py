"""Records of locks that this package has not written, or that say what strangers wanted."""

from __future__ import annotations

from typing import Any

from tests.holding import name_of

FAR = 9 * 10**13  # Redis TIME in ms, of 14 digits: long after each test
HUGE = "9" * 400
UNREADABLE = [f"1 {HUGE} 5 1 x {{}}", f"1 {FAR} {HUGE} 1 x {{}}", f"1 {FAR} 5 {HUGE} x {{}}", "9"]
STRANGE = [
    '{"task": NaN, "id": NaN, "worker": NaN, "pid": Infinity, "timeout": NaN}',
    f'{{"task": {HUGE}, "id": {HUGE}, "worker": {HUGE}, "pid": {HUGE}, "timeout": {HUGE}}}',
    '{"task": "\\ud800x", "id": "\\ud800x", "worker": "\\ud800x", "timeout": 1e999}',
    '{"task": ["t"], "id": {}, "worker": 7, "pid": "7", "host": [], "timeout": true}',
    '{"parked": true, "id": "\\ud800"}',
]
MEMBERS = [
    *("#", "##", "x##", "-1/x##", "9/##", f"{HUGE}/x##"),
    *(f"18/{name_of('limited')}t:0:0##", f"24/{name_of('limited')}:limit##"),
]


def damage(client: Any) -> None:
    """Write locks with such records: unreadable-N, strange-N, limited and lined."""
    for number, record in enumerate(UNREADABLE):
        client.hset(name_of(f"unreadable-{number}"), "owner", record)
    for number, holder in enumerate(STRANGE):
        client.hset(name_of(f"strange-{number}"), "owner", f"1 {FAR} 5 {FAR} x {holder}")
    client.set(name_of("limited") + ":limit", f"1 {'9' * 15} {'9' * 14} why")
    line, tickets = name_of("lined") + ":line", name_of("lined") + ":tickets"
    headers = ['"text"', '{"id": NaN, "task": NaN}', '{"id": "\\ud800x", "task": "\\ud800"}', "[]"]
    for number, one in enumerate(headers):
        client.zadd(line, {f"t{number}:0:0#": "-inf"})
        message = f'1 {{"headers": {one}, "routing_key": NaN}}'
        record = f"1 {FAR} 9 60000 home {len(message.encode())} x:1 {message}"
        client.hset(tickets, f"t{number}:0:0", record)
    for member in MEMBERS:
        client.zadd(line, {member: 1})
    client.zadd(line, {"w@w:1/1": "+inf"})
    client.hset(name_of("lined") + ":places", "w@w:1/1", f"1 {'9' * 5000} {HUGE} x {HUGE} []")
