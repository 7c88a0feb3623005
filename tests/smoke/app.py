"""The worker's app: pytest-celery fills in the tasks' imports and the configuration.

It does so by replacing three of the lines below, which must stay as they are.
"""

from celery import Celery

from celery_dislock import Dislock

imports = None

app = Celery("celery_test_app")
config = None

if config:
    app.config_from_object(config)

Dislock(app)
