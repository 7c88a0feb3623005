"""The next release of this package: what is installed here, with later versions of all records.

It reads what this release writes, and writes a higher version with a field that is new.
"""

import shutil

import celery_dislock

HERE = celery_dislock.__path__[0]
IS_LATER = "is_later = version and version ~= '1'"
CHANGES = {
    "messages/headers.py": {"VERSION = 1  #": "VERSION = 2  #"},
    "scripts/_record.lua": {"{version or '1',": "{version or '2',"},
    "scripts/_line.lua": {
        "'1 %.0f %.0f %s %s'": "'2 %.0f %.0f %s %s'",
        "is_later = version ~= '1'": "is_later = version ~= '1' and version ~= '2'",
        "parse_stations(between,": "parse_stations((string.gsub(between, ' new$', '')),",
    },
    "scripts/_parked.lua": {
        "parked.version or '1'": "parked.version or '2'",
        "or write_stations(parked.stations))": "or write_stations(parked.stations) .. ' new')",
        "'1 %.0f %.0f %.0f '": "'2 %.0f %.0f %.0f '",
        "    write_stations(claim.stations))": "    write_stations(claim.stations) .. ' new')",
        IS_LATER: f"{IS_LATER} and version ~= '2'",
        "parse_stations(rest or '',": "parse_stations((string.gsub(rest or '', ' new$', '')),",
    },
    "scripts/_reservation.lua": {"{'1', ...}": "{'2', ...}"},
    "scripts/_unique.lua": {
        "not string.find(record, '^1 ')": "not string.find(record, '^[12] ')",
        "'^1 ([swrd-])": "'^[12] ([swrd-])",
    },
    "scripts/_beat.lua": {
        "{'1', last,": "{'2', last,",
        "version ~= '1'": "version ~= '1' and version ~= '2'",
    },
    "scripts/override.lua": {"'2 %s %s": "'3 %s %s"},
}


def next_release(folder):
    """Make it in this folder; return what must come first on the path of Python."""
    root = folder / "next"
    package = root / "celery_dislock"
    shutil.copytree(HERE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in CHANGES.items():
        text = (package / name).read_text("utf-8")
        for old, new in changes.items():
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (package / name).write_text(text, "utf-8")
    return root
