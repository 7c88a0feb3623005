"""Breaks of the scripts: what each replaces in their text.  The simulation finds each of them."""

# ruff: noqa: E501 -- the text of scripts

BROKEN = {
    "one more is let in": (
        "math.min(terms.cost, limit) <= limit",
        "math.min(terms.cost, limit) <= limit + 1",
    ),
    "a start counts as one, whatever its cost": (
        "log.carry + math.min(terms.cost, most)",
        "log.carry + 1",
    ),
    "what was not spent is not taken back": (
        "elseif most and spent < counted then",
        "elseif false then",
    ),
    "what was spent beyond the cost is not counted": ("cost = spent - counted,", "cost = 0,"),
    "what was spent counts twice": (
        "    if spent ~= counted then",
        "    if false then",
    ),
    "what was not spent is taken back twice": (
        "math.min(counted, log.most) - math.min(spent, log.most), time",
        "2 * (math.min(counted, log.most) - math.min(spent, log.most)), time",
    ),
    "one start too many": ("log.quantum == 1 and most or", "log.quantum == 1 and most + 1 or"),
    "the starts of a slower rate are forgotten": ("math.max(most, log.most)", "most"),
    "a claim is not counted": ("    count_start(at, station.terms)\n", ""),
    "turns are given hours ahead": ("lock.early <= SOON_US and", "true and"),
    "an operator's rate is not heeded": (
        "if set then return set.most, set.window end",
        "",
    ),
    "a rate that is set for ever ends": (
        "if set and set.until_ms > 0 then",
        "if set then",
    ),
    "the end of a rate that is set is its start": (
        "math.max((set.until_ms - now) * 1000, of_code)",
        "math.min((set.until_ms - now) * 1000, of_code)",
    ),
    "a rate that is set forgets the code's window": (
        "math.max(window, terms.window or 0)",
        "window",
    ),
    "who waits behind a slower rate asks over and over": (
        "math.max(lock.early, starts_in(lock, terms, lock.gates + rank))",
        "starts_in(lock, terms, lock.gates + rank)",
    ),
    "starts in the future stay there": (
        "if log.newest <= now_us then return log end",
        "do return log end",
    ),
    "starts in the future are forgotten": (
        "for _ = 1, later do redis.call('LPUSH', starts, now_as_token) end",
        "",
    ),
    "a start is told a second late": (
        "before + window * 1000 - now_us)",
        "before + window * 1000 - now_us + 1000000)",
    ),
    "what fills no quantum is forgotten": ("log.carry = log.carry + ", "log.carry = "),
    "a log is longer than it must be": ("starts, 0, kept - 1)", "starts, 0, -2)"),
    "shared leases pass an exclusive one": ("lock.x == 0 and limit > 0", "limit > 0"),
    "tokens do not grow": ("return newest < now_us and now_as_token or", "return '7' or"),
    "a pause is not heeded": ("terms, limit_set(lock))", "terms)"),
    "a task may run again when it is done": ("mark_done(lock, ticket)", ""),
    "the last in line is served first": (
        "local head = redis.call('ZRANGE', lock.line, 0, 0)[1]",
        "local head = redis.call('ZRANGE', lock.line, -1, -1)[1]",
    ),
    "a newcomer passes the line": (
        "(not line_is_there or passes_line and not is_large_first(lock)) then",
        "true then",
    ),
    "a large one at the head is passed": (
        "passes_line and not is_large_first(lock)",
        "passes_line",
    ),
    "a turn that ran out goes to the end": (
        "join(lock, member_of(ticket), parked and parked.joined or 0)",
        "join(lock, member_of(ticket), now_us)",
    ),
    "a line is longer than it may be": ("waiting() - most + 1", "waiting() - most"),
    "a turn that ran out is forgotten": (
        "join(lock, member_of(ticket), parked and parked.joined or 0)",
        "",
    ),
    "a later lock is not taken": (
        "  for nth, station in ipairs(stations) do\n    local at = nth == 1 and lock or open_whole(station.name)\n    answer",
        "  for nth, station in ipairs({stations[1]}) do\n    local at = nth == 1 and lock or open_whole(station.name)\n    answer",
    ),
    "the line of a later lock is passed": (
        "is_in_front(at, member, station.arrived)",
        "(nth > 1 or is_in_front(at, member, station.arrived))",
    ),
    "an older task begins after the newest": (
        "if newer and not (ran and parse_claim(ran).settles > now) then",
        "if false then",
    ),
    "a turn is told to end for a newer task": (
        "local runs = not is_parked(owner) and ",
        "local runs = ",
    ),
    "a holder ends for a task that was dropped": (
        "if superseded_by(lease.holder) == one.task then",
        "if false then",
    ),
    "no holder ends for a newer task": (
        "lease.holder = with_mark(lease.holder, canceller.task)",
        "",
    ),
    "a lock is taken while it is held back": (
        "local opens = back and (back.until_ms - now) * 1000 or 0",
        "local opens = 0",
    ),
    "circles stay closed": ("local circle = circle_of(lock, ticket)", "local circle = nil"),
    "who stands nowhere is not looked for": ("count_tickets(lock) > known and", "false and"),
    "a claim may come early": (
        "local early, its = starts_when(stations)",
        "local early, its = 0, nil",
    ),
    "what is dropped keeps its units": (
        "give_up(lock, ticket, (parked or claim or {}).stations or {{}}, 1)",
        "if claim then give_up(lock, ticket, (parked or claim).stations, 1) end",
    ),
    "only the first lock is granted": (
        "at.name, grant(at, owner, ttl, station.terms, holder)",
        "at.name, nth == 1 and grant(at, owner, ttl, station.terms, holder) or '1'",
    ),
    "what is kept is not counted": (
        "if not unit then grant(",
        "if not unit and nth == 0 then grant(",
    ),
    "the last of the limit is refused": (
        "math.min(terms.cost, limit) <= limit",
        "math.min(terms.cost, limit) <= math.max(1, limit - 1)",
    ),
    "exclusive passes shared": ("lock.s == 0 and limit > 0 and", "limit > 0 and"),
    "hand_over keeps the token": (
        "tonumber(lease.token) < now_us and now_as_token or string.format('%.0f', lease.token + 1)",
        "lease.token",
    ),
    "acquire twice: new token": (
        "    renew(lock, mine, ttl)\n    pcall(redis.call, 'DEL', lock.name .. WAKE .. owner)  -- if it is hidden while the slot moves, it expires\n    return mine.token, false",
        "    return grant(lock, owner, ttl, terms, holder), false",
    ),
    "a renewal revives": (
        "if not lease or lease.expires <= now then return 0 end",
        "if not lease then return 0 end",
    ),
    "a renewal adds": (
        "lease.expires = now + ttl_ms\n  write_first",
        "lease.expires = lease.expires + ttl_ms\n  write_first",
    ),
    "places stay": (
        "  redis.call('HDEL', lock.places, owner)\n  redis.call('ZREM', lock.line, owner)\nend",
        "  redis.call('ZREM', lock.line, owner)\nend",
    ),
    "a lease's key has no expiry": (
        "if alone then redis.call('PEXPIRE', lock.name, ttl_ms) else live_at_least(lock.name, ttl_ms) end",
        "",
    ),
    "a line's key has no expiry": ("live_at_least(lock.line, place_ms)", ""),
    "a hash ends before its longest lease": (
        "else live_at_least(lock.name, ttl_ms) end",
        "else redis.call('PEXPIRE', lock.name, ttl_ms) end",
    ),
    "left to expire ends at once": (
        "local runs_out = at_least_ms > 0 and ends > now",
        "local runs_out = false",
    ),
    "at least counts from the release": (
        "local ends = lease.acquired + at_least_ms",
        "local ends = now + at_least_ms",
    ),
    "a waiter that gives up stays": (
        "if hands_off and found.may_wait then leave_line(lock, owner) end",
        "",
    ),
    "a refusal tells the last to end": (
        "if not first or sooner < 0 or",
        "if not first or sooner > 0 or",
    ),
    "a dead waiter is not passed over": (
        "if not deadline or tonumber(deadline) <= now then return nil end",
        "if not deadline then return nil end",
    ),
    "last in line first": (
        "local head = redis.call('ZRANGE', lock.line, 0, 0)[1]\n    if not head then return token end",
        "local head = redis.call('ZRANGE', lock.line, -1, -1)[1]\n    if not head then return token end",
    ),
    "a hand-off lasts": (
        "local take_up = math.min(place.ttl, TAKE_UP_MS)",
        "local take_up = place.ttl",
    ),
    "a rejoining waiter goes to the end": (
        "local joined = not redis.call('ZSCORE', lock.line, owner) and joins_at(lock)",
        "local joined = joins_at(lock)",
    ),
    "no done-mark of a release": ("if settles_ms >= 0 then mark_done(lock, ticket) end", ""),
    "bytes are counted wrong": ("TOTAL, #record - before)", "TOTAL, #record)"),
    "turns do not get longer": ("parked.ttl * 2 ^ parked.times", "parked.ttl"),
    "a turn gets shorter": ("lasts = math.max(lasts, ", "lasts = math.max(lasts, 0 * "),
    "a copy runs beside": ("local other = copy_of(lock, owner)", "local other = nil"),
    "who ran comes last": ("return put_in_line(before.joined,", "return put_in_line(now_us,"),
    "a replaced one is not told": (
        "local key, found, bytes = lock.name .. REPLACED, {}, 0",
        "local key, found, bytes = lock.name .. REPLACED, {}, 0\n  do return {} end",
    ),
    "a message of another": (
        "parked.ttl, parked.broker, #parked.message)",
        "parked.ttl, parked.broker, #parked.message - 1)",
    ),
    "an older one may run after the newest": ("canceller and newer_than(lock, canceller)", "nil"),
    "only who waits counts": ("ipairs({'waits', 'began'})", "ipairs({'waits'})"),
    "the youngest is told to end": (
        "lease.token - oldest.token < 0",
        "lease.token - oldest.token > 0",
    ),
    "who has its turn keeps it beside the newest": (
        "return count_tickets(lock) - (canceller and 0 or redis.call('ZCARD', lock.handed))",
        "return count_tickets(lock) - redis.call('ZCARD', lock.handed)",
    ),
    "what was dropped is the newest for ever": (
        "redis.call('HDEL', lock.name .. NEWEST, 'waits')\n    for",
        "for",
    ),
    "a sweep tells nobody to end": ("\nsupersede(lock)\n", "\n"),
    "a renewal tells nobody to end": ("return superseded_by(lease.holder) or 1", "return 1"),
}
