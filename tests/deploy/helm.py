"""Renders a chart with Helm, in the namespace `numaward`, for each object of a JSON array on standard input: its `values`, and what is
`installed` in the cluster, if anything.

Prints a JSON array: for each, what it renders as one text, or why Helm refuses the values. What Helm's linter finds ends it.
"""

import json
import pathlib
import shutil
import sys
import tempfile

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


def rendered_beside(path, installed, values):
    """Renders a copy of the chart in which the template that asks the cluster has this answer."""
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory, "numaward")
        shutil.copytree(path, copy)
        # Of two templates of one name, that of the first file counts.
        template = '{{- define "numaward.installed" -}}' + json.dumps(installed) + "{{- end }}"
        (copy / "templates" / "_a.tpl").write_text(template)
        with helm.Chart.load(str(copy)) as chart:
            return rendered(chart, values)


path = sys.argv[1]
faults = [found for found in helm.lint(path)["messages"] if found["severity"] >= ERROR]
if faults:
    sys.exit("\n".join(f"{found['path']}: {found['error']}" for found in faults))
with helm.Chart.load(path) as chart:
    results = [
        rendered_beside(path, item["installed"], item["values"]) if "installed" in item else rendered(chart, item["values"])
        for item in json.load(sys.stdin)
    ]
    json.dump(results, sys.stdout)
