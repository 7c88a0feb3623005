"""A site whose middleware holds a lock around its view, which takes the lock again.

It is a program of its own, because Django's settings are those of a process.  Its arguments are the
URL of the lock server, and "wsgi" or "asgi".  Prints what the view answers.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import django
from django.conf import settings
from django.http import HttpResponse
from django.urls import path

from celery_dislock import Dislock

_dislock = Dislock.from_url(sys.argv[1])


def alone(get_response: Any) -> Any:
    """Make the middleware."""

    def middleware(request: Any) -> Any:
        with _dislock.lock("site"):
            return get_response(request)

    return middleware


def view(_request: Any) -> HttpResponse:
    with _dislock.lock("site", timeout=0):
        return HttpResponse("inside")


urlpatterns = [path("", view)]


def main(server: str) -> bytes:
    settings.configure(
        ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.alone"], ALLOWED_HOSTS=["*"], USE_TZ=True
    )
    django.setup()
    from django.test import AsyncClient, Client

    if server == "wsgi":
        content: bytes = Client().get("/").content
    else:
        content = asyncio.run(AsyncClient().get("/")).content  # type: ignore[arg-type]
    return content


if __name__ == "__main__":
    with _dislock:
        sys.stdout.write(main(sys.argv[2]).decode())
