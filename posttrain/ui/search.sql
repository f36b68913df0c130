CREATE TABLE IF NOT EXISTS choices (kind TEXT, value TEXT, PRIMARY KEY (kind, value)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, fingerprint TEXT);
CREATE TABLE IF NOT EXISTS prompts (id INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER);
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER, prompt INTEGER, rollout INTEGER, prompt_id INTEGER, row INTEGER,
    reward REAL, advantage REAL, length INTEGER, ended TEXT, verdict TEXT, push REAL, clipped INTEGER, ratio REAL
);
CREATE INDEX IF NOT EXISTS rollouts_step ON rollouts (step, prompt, rollout);
CREATE TABLE IF NOT EXISTS parts (
    rollout_id INTEGER, name TEXT, value REAL, PRIMARY KEY (rollout_id, name)
) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS completion_texts USING fts5(text, content='', detail='full');
CREATE VIRTUAL TABLE IF NOT EXISTS prompt_texts USING fts5(text, content='', detail='full');
