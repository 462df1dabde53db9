"""Recorders for runs of other engines: every response into a rollout store, beside the training.

    record_trl(trainer, "run/rollouts")     any GRPOTrainer of TRL, before it trains
    record_verl("run/rollouts")             verl, before its trainer is made
    WINDAGE_RECORD=run/rollouts             the same from the environment, where windage is a plugin
    windage record prime-rl RUN             a run of prime-rl that exported tokens

The training thread copies tensors; a thread of its own turns them into rows and writes a step's
file.  If the disk is slower than the run, training waits: nothing is left out silently, and what
the thread could not write is raised at the next step.

Differences from what the engines know:
    1. `behavior_logp` falls back to the trainer's log-probabilities where the engine gave none.
    2. `versions` is the first of the weights that drew a response, where the engine knows several.
    3. The sum of squared probabilities (`square`) is the trainer's: of TRL's first pass over the
       responses, of verl's pass for the old log-probabilities.  Both make it beside those, and only
       if asked.
    4. A head (`head`) is vLLM's under TRL.  verl asks its engines for the sampled token alone.
    5. Engines tell log-probabilities after temperature, top-k and top-p, never also those before,
       so `raw_logp` is absent; verl's `raw_logprobs` are refused where the two differ.
    6. `rejected` is `masked` where verl left no token of a response to train on, and `truncated`
       where TRL leaves out what its limit cut: such rows have no log-probabilities of the trainer.
       Groups that verl filters away (DAPO) never come to the hook.
"""

from windage.llm.record.trl import record_trl
from windage.llm.record.verl import record_verl

__all__ = ["record_trl", "record_verl"]
