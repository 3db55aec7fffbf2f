"""How importance is learned: the rules that a learnable mask can follow."""
