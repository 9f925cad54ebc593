"""Print the requirements of the extras at their lowest versions, for `make test-oldest`.

There are wheels of such versions for the lowest Python alone: others get the lowest FastAPI, which
has no compiled part, and the newest of the rest.
"""

import sys
import tomllib
from pathlib import Path

# Those of torch and Ray are large.
EXTRAS = ("fastapi", "json", "prometheus", "cli", "opentelemetry")

with Path("pyproject.toml").open("rb") as file:
    project = tomllib.load(file)["project"]
is_lowest = project["requires-python"] == f">={sys.version_info[0]}.{sys.version_info[1]}"
needed = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
# The tests of OpenTelemetry use the SDK, which is of the version of its API.
needed += [one.replace("-api", "-sdk") for one in needed if one.startswith("opentelemetry-api")]
for one in needed:
    is_fixed = is_lowest or one.startswith("fastapi")
    sys.stdout.write(one.replace(">=", "==") + "\n" if is_fixed else one + "\n")
