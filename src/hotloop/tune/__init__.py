"""From a loop to the plan that suits it: the search over levers, trials that time plans, and the cache of plans."""
