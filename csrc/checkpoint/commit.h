/* commit.h - how a folder of files becomes a checkpoint, at one instant, and how old ones go.
 *
 * The order is the whole idea, and tests cut it at every call: all files durable, then the manifest
 * inside, then the folder's name, then the parent that holds the name, and only then does anything
 * older disappear.
 *
 * Thread rule: owner only.
 */
#ifndef SW_CHECKPOINT_COMMIT_H
#define SW_CHECKPOINT_COMMIT_H

#include "base/status.h"
#include "checkpoint/manifest.h"

#define SW_RANKS_FOLDER "ranks"
#define SW_LOCK_NAME "LOCK" /* in a folder that is being written */

/* Makes `partial`, which holds every file of the complete `manifest`, the checkpoint `folder`. An
 * existing folder of that name is replaced in one step; where the file system cannot
 * exchange names, in two, between which readers find it as `folder`.replaced (read.h). What is no
 * checkpoint (removable.h) is not replaced: an error, as it is where it became none meanwhile. On
 * an error before the name changed, nothing of `folder` changed. */
SW_MUST_USE sw_status sw_commit(const char *partial, const char *folder,
                                const sw_manifest *manifest, sw_error *err);

/* Removes what the commit has replaced. */
void sw_commit_clean(const char *folder, const char *nonce);

/* Renames each folder to <name>.<nonce>.trash, makes that durable, and unlinks. As far as it can:
 * what it leaves behind is no checkpoint, and the next writer removes it. What is not removable
 * (removable.h) stays. */
void sw_retire(const char *const *folders, size_t count, const char *nonce);

#endif
