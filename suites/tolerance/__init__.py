"""What the budgets are worth: emulated kernels, honest and faulty, judged by our rules and by those of the peers."""
