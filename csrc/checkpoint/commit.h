/* commit.h - how a folder of files becomes a checkpoint in one atomic step, and how old ones are
 * removed.
 *
 * Thread rule: the commit, owner only; what may be removed, any. */
#pragma once

#include "base/status.h"
#include "checkpoint/manifest.h"

/* ---- what a save, and retention after it, may remove ---- */

/* The rule: a folder may be removed if it holds only files that its checkpoint lists. Any other
 * folder of that name may hold user data, and stays. */

/* SW_OK: `path` is missing, an empty folder, or a checkpoint that this program could have written,
 * without other files. Every file must be listed by its manifest. If the manifest is damaged, every
 * name must be one that a checkpoint may have, state.json among them. SW_E_UNSUPPORTED: a
 * checkpoint of a newer version. SW_E_INVALID names any other content; SW_E_OS: the folder could
 * not be examined. Cost: one read of the manifest, one listing of the folder. */
SW_MUST_USE sw_status sw_checkpoint_check_removable(const char *path, sw_error *err);

/* Check a folder and its replaced name (read.h) likewise: a save to `folder` replaces both. */
SW_MUST_USE sw_status sw_checkpoint_check_replaceable(const char *folder, sw_error *err);

/* ---- the commit ---- */

/* The idea is the order, which tests interrupt at every call. First all files become durable, then
 * the manifest inside, then the folder's name, then the parent that holds the name. Only then are
 * older folders removed. */

enum { SW_IDENTITY_BYTES = 128 };

/* Identify the folder at `folder`, or under its replaced name (read.h). The result is "" for no
 * folder, else a text that differs from that of every later folder of this name. Cost: one lstat
 * and one read of the manifest. */
void sw_checkpoint_identify(const char *folder, char identity[SW_IDENTITY_BYTES]);

/* Make `partial`, which holds every file of the complete `manifest`, the checkpoint `folder`.
 *
 * `replaces` is the identity of `folder` when the save began. If the folder has another identity,
 * another save wrote it meanwhile: it stays, and the call fails with SW_E_STATE. Check and rename
 * are one step: rename() replaces no folder with entries, and an exchanged folder that is not the
 * expected one is exchanged back.
 *
 * An existing folder of that name is replaced in one step and retired. Where the file system cannot
 * exchange names, two steps are needed; between them readers find it as `folder`.replaced (read.h).
 * A folder that is not a checkpoint, or ceased to be one meanwhile, is not replaced;
 * the call fails. After an error before the rename, `folder` is unchanged. */
SW_MUST_USE sw_status sw_commit(const char *partial, const char *folder, const char *replaces,
                                const sw_manifest *manifest, sw_error *err);

/* Remove the folder that the commit replaced. */
void sw_commit_clean(const char *partial, const char *folder, const char *nonce);

/* Rename each folder to <name>.<nonce>.trash, make that durable, then unlink as much as possible.
 * What remains is not a checkpoint, and the next writer removes it. A folder that may not be
 * removed stays. */
void sw_retire(const char *const *folders, size_t count, const char *nonce);
