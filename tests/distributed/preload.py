"""What every rank needs, imported once, before ranks are forked."""

import tests.distributed.conformance
import tilewise.distributed.call  # noqa: F401
