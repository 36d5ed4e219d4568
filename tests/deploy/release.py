"""Installs, upgrades, tests or uninstalls the chart with Helm, as the release `numaward` in the namespace `numaward`.

    release.py ACTION KUBECONFIG [CHART]

`install` and `upgrade` read values from standard input (a JSON object), and replace all earlier values. Hooks have run when an
action ends.
"""

import json
import sys

import helm_python as helm

NAME = "numaward"
TIMEOUT_SECONDS = 900

action, kubeconfig, *chart = sys.argv[1:]
with helm.Config(kubeconfig_path=kubeconfig, namespace=NAME) as config:
    try:
        if action == "install":
            config.install(*chart, NAME, json.load(sys.stdin), timeout=TIMEOUT_SECONDS)
        elif action == "upgrade":
            config.upgrade(*chart, NAME, json.load(sys.stdin), reset_values=True, timeout=TIMEOUT_SECONDS)
        elif action == "test":
            config.test(NAME, timeout=TIMEOUT_SECONDS)
        elif action == "uninstall":
            config.uninstall(NAME, timeout=TIMEOUT_SECONDS)
        else:
            sys.exit(f"{action}: not an action")
    except helm.HelmError as error:
        sys.exit(f"helm {action}: {error}")
