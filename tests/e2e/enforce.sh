section checks
numaward-enforce-check
section end
