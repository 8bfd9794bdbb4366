"""What every rank needs, imported once, before ranks are forked."""

import tests.distributed.conformance  # noqa: F401
import tilewise.distributed.call  # noqa: F401
