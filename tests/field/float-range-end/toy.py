import json
import sys

a = json.load(sys.stdin)["a"]
x, n, mode = a["x"], a["n"], a["mode"]
answers = {
    "bad": {"time_s": float("nan"), "thr": 1.0},
    "worse": {"time_s": float("inf"), "thr": 1.0},
    "neg": {"time_s": -1.0, "thr": 1.0},
}
time_s = abs(x) + 0.5 * n + (mode != "fast")
answer = answers.get(mode, {"time_s": time_s, "thr": 1 / time_s})
print(json.dumps({"status": "infeasible", "reason": "no"} if mode.startswith("infeasible") else answer))
