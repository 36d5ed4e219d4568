set -eu
section checks
numaward-enforce-check
