"""Cut units away and put them back: modules, states, optimisers, files."""
