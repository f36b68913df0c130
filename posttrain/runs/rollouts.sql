CREATE TABLE IF NOT EXISTS prompts (
    step INTEGER, prompt_index INTEGER, row INTEGER, epoch REAL, prompt TEXT, tokens BLOB, facts TEXT,
    PRIMARY KEY (step, prompt_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollouts (
    step INTEGER, prompt_index INTEGER, rollout_index INTEGER, completion TEXT, reward REAL, advantage REAL,
    finish_reason TEXT, version INTEGER, parts TEXT, tokens BLOB, sampler_logprobs BLOB, old_logprobs BLOB,
    new_logprobs BLOB, ref_logprobs BLOB, advantages BLOB, clipped BLOB, old_values BLOB, returns BLOB, entropies BLOB,
    penalties BLOB, turns TEXT,
    PRIMARY KEY (step, prompt_index, rollout_index)
);
CREATE TABLE IF NOT EXISTS evaluations (
    step INTEGER, dataset TEXT, row INTEGER, prompt TEXT, completion TEXT, reward REAL, finish_reason TEXT, parts TEXT,
    tokens BLOB
);
CREATE INDEX IF NOT EXISTS evaluations_step ON evaluations (step);
