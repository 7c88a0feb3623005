"""What a script knows of a lock is what the server has, whatever the script has done meanwhile."""

from __future__ import annotations

import hashlib
import json

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_dislock.scripts import Script
from celery_dislock.scripts.files import read_lua
from tests.integration import driven_clock

LOCK = "dislock:{k}"
OWNERS = "abc"

# Carries out what it is told, and answers what it knows and what is there: newest token, leases of
# each mode, and the one that ends first; whether the next token is higher than all that were given,
# and whether the hash lives as long as its leases.
DRIVER = """
local lock, kept = open(KEYS[1]), 0
if ARGV[1] == 'counted' then count_leases(lock) end
local told = cjson.decode(ARGV[2])
for _, step in ipairs(told) do
  local what, owner, ms = step[1], step[2], step[3]
  local lease = lease_of(lock, owner)
  if what == 'x' or what == 's' then kept = math.max(kept, grant(lock, owner, ms, what, '{}'))
  elseif lease and what == 'renew' then renew(lock, lease, ms)
  elseif lease and what == 'drop' then drop(lock, lease); kept = math.max(kept, lease.token)
  elseif lease and what == 'finish' then finish(lock, lease, ms) end
end
local function known(of)
  local owners = {}
  for _, lease in ipairs(leases_of(of, '')) do owners[#owners + 1] = lease.owner end
  table.sort(owners)
  local remaining = in_the_way(of)
  return {of.x, of.s, remaining, table.concat(owners, ' ')}
end
local lives = 1
for _, lease in ipairs(leases_of(lock, '')) do
  if redis.call('PTTL', KEYS[1]) < lease.expires - now then lives = 0 end
end
return {known(lock), known(open(KEYS[1])), tonumber(new_token(lock)) > kept and 1 or 0, lives}
"""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["x", "s", "renew", "drop", "finish"]),
        st.sampled_from(OWNERS),
        st.integers(1, 9).map(lambda seconds: seconds * 1000),
    ),
    max_size=12,
)


def driver() -> Script:
    text = read_lua("_record") + read_lua("_lease") + read_lua("_grant") + DRIVER
    return driven_clock.clocked(
        Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    )


@example(  # the first to end is gone
    before=[("s", "a", 2000), ("s", "b", 9000)],
    steps=[("drop", "a", 1000)],
    counted=True,
    seconds=0,
)
@example(  # one that only runs out outlives the others
    before=[("s", "a", 2000), ("s", "b", 3000)],
    steps=[("finish", "a", 9000)],
    counted=False,
    seconds=0,
)
@example(  # ended in this very millisecond
    before=[("x", "a", 2000)],
    steps=[],
    counted=True,
    seconds=2,
)
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(before=STEPS, steps=STEPS, counted=st.booleans(), seconds=st.integers(0, 9))
def test_the_leases_that_a_script_knows_are_those_that_there_are(
    redis_client, before, steps, counted, seconds
):
    """After any grants and ends the counts, the first to end and the newest token are true."""
    script = driver()
    driven_clock.start(redis_client)
    for told, when in ((before, True), (steps, counted)):
        known, there, newer, lives = redis_client.eval(
            script.text, 1, LOCK, "counted" if when else "", json.dumps(told)
        )
        assert known == there
        assert newer
        assert lives
        driven_clock.advance(redis_client, seconds)
