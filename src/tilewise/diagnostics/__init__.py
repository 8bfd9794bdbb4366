"""What a call would do, did, and whether its answer is right: plan, explain, certify, trace_nonfinite."""
