"""Login files: who may log in, and with which password."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

import pytest

from celery_dislock.exceptions import SettingsError
from celery_dislock.operating.web import login
from celery_dislock.operating.web.login import LoginFile, line_of, set_password, users_in

PASSWORD = "correct horse"  # noqa: S105 -- of nobody


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    monkeypatch.setattr(login, "N", 2)
    monkeypatch.setattr(login, "P", 1)


@pytest.fixture
def path(tmp_path):
    """A login file with ann."""
    path = tmp_path / "users"
    set_password(path, "ann", PASSWORD)
    return path


def test_a_user_logs_in_with_the_right_password(path):
    """And with no other, and nobody else does."""
    check = LoginFile(path)
    assert check("ann", PASSWORD)
    for user, password in [("ann", ""), ("ann", PASSWORD + " "), ("eve", PASSWORD), ("", "")]:
        assert not check(user, password)
    assert not check("ann", "a" * 10**6)
    assert not check("ann", "\ud800")


def test_the_file_has_no_password(path):
    """It has scrypt's parameters, a salt of its own for each line, and the hash."""
    text = path.read_text("utf-8")
    assert PASSWORD not in text
    name, kind, n, r, p, salt, digest = text.strip().split(":")
    made = hashlib.scrypt(
        PASSWORD.encode(), salt=bytes.fromhex(salt), n=int(n), r=int(r), p=int(p), dklen=32
    )
    assert (name, kind, digest) == ("ann", "scrypt", made.hex())
    assert line_of("ann", PASSWORD) != line_of("ann", PASSWORD)


def test_hashes_are_as_costly_as_is_recommended(monkeypatch):
    """The figures of OWASP: 32 MB, three passes."""
    monkeypatch.undo()
    assert (login.N, login.R, login.P) == (2**15, 8, 3)


def test_passwords_are_compared_in_constant_time(path, monkeypatch):
    """By hmac.compare_digest, and for a user who is not there, too."""
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or real(*pair))
    check = LoginFile(path)
    check("ann", "wrong")
    check("eve", "wrong")
    assert [len(mine) for mine, _ in compared] == [32, 32]


def test_a_password_can_be_changed_and_a_user_taken_out(path):
    """The file is read again: who is not in it any more is out at once."""
    check = LoginFile(path)
    stamp = check.stamp("ann")
    set_password(path, "bob", "another password")
    assert check("ann", PASSWORD)
    assert check("bob", "another password")
    assert check.stamp("ann") == stamp
    set_password(path, "ann", "a new password")
    assert not check("ann", PASSWORD)
    assert check.stamp("ann") not in (stamp, None)
    path.write_text("# nobody\n\n", "utf-8")
    assert not check("ann", "a new password")
    assert check.stamp("ann") is None


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_only_its_owner_can_read_the_file(path, caplog):
    """It is written so, and one that is open to others is reported."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    LoginFile(path)
    assert caplog.text == ""
    path.chmod(0o644)
    LoginFile(path)
    assert f"The login file {path} is open to other users of this machine" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "ann:secret",
        "ann",
        "ann:scrypt:3:8:1:" + "0" * 32 + ":" + "0" * 64,  # n is no power of two
        "ann:scrypt:0:8:1:" + "0" * 32 + ":" + "0" * 64,
        "ann:scrypt:2:0:1:" + "0" * 32 + ":" + "0" * 64,
        "ann:scrypt:16777216:8:1:" + "0" * 32 + ":" + "0" * 64,  # 17 GB
        "ann:scrypt:2:8:999:" + "0" * 32 + ":" + "0" * 64,
        "ann:scrypt:2:8:1:zz:" + "0" * 64,
        "a b:scrypt:2:8:1:" + "0" * 32 + ":" + "0" * 64,
    ],
)
def test_a_line_that_cannot_be_used_is_an_error(line):
    """It has the line's number, and not what is in it."""
    with pytest.raises(SettingsError, match="line 2") as caught:
        users_in(f"# users\n{line}\n", "users")
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    """When the page is made, not at the first login."""
    with pytest.raises(SettingsError, match="No such file"):
        LoginFile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        LoginFile(tmp_path / "binary")
    with pytest.raises(SettingsError, match="No such file"):
        set_password(tmp_path / "no" / "folder", "ann", PASSWORD)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a\n", "a" * 65, "ä"])
def test_names_are_plain(name):
    """A name is one field of a line."""
    with pytest.raises(SettingsError, match="user"):
        line_of(name, PASSWORD)


@pytest.mark.parametrize("password", ["", "short", "a" * 1025])
def test_passwords_have_bounds(password):
    """The error does not show one."""
    with pytest.raises(SettingsError, match="8 characters") as caught:
        line_of("ann", password)
    assert "short" not in str(caught.value)
