"""The page: locks in a browser.  ``Page(app)`` is a WSGI application, and needs no framework."""

from celery_dislock.operating.web.page import Page as Page
