"""Renders a chart with Helm, in the namespace `numaward`, for each values on standard input (a JSON array of objects).

Prints a JSON array: for each, what it renders as one text, or why Helm refuses the values. What Helm's linter finds ends it.
"""

import json
import sys

import helm_python as helm

ERROR = 3


def rendered(chart, values):
    try:
        chart.validate_schema(values)
        files = chart.render(values, name="numaward", namespace="numaward")
    except helm.HelmError as error:
        return {"refused": str(error)}
    manifests = (text for path, text in sorted(files.items()) if path.endswith(".yaml"))
    return {"text": "\n---\n".join(manifests)}


path = sys.argv[1]
faults = [found for found in helm.lint(path)["messages"] if found["severity"] >= ERROR]
if faults:
    sys.exit("\n".join(f"{found['path']}: {found['error']}" for found in faults))
with helm.Chart.load(path) as chart:
    json.dump([rendered(chart, values) for values in json.load(sys.stdin)], sys.stdout)
