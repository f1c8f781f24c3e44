//! `plan.json` (`k3.plan/1`).
