/* commit.h - how a folder of files becomes a checkpoint, at one instant, and how old ones go.
 *
 * The order is the idea, and tests cut it at every call. All files become durable, then the
 * manifest inside, then the folder's name, then the parent that holds the name. Only then does
 * anything older disappear.
 *
 * Thread rule: owner only. */
#ifndef SW_CHECKPOINT_COMMIT_H
#define SW_CHECKPOINT_COMMIT_H

#include "base/status.h"
#include "checkpoint/manifest.h"

enum { SW_IDENTITY_BYTES = 128 };

/* Identify the folder at `folder`, or under its replaced name (open.h). "" if there is none, else a
 * text that differs from that of every folder that takes the name later. Cost: one lstat and one
 * read of the manifest. */
void sw_checkpoint_identify(const char *folder, char identity[SW_IDENTITY_BYTES]);

/* Make `partial`, which holds every file of the complete `manifest`, the checkpoint `folder`.
 *
 * `replaces` is the identity of `folder` when the save began. A folder with another identity was
 * written by another save meanwhile: it stays, with SW_E_STATE. Check and rename are one step:
 * rename() replaces no folder with entries, and an exchanged folder that is not the expected one is
 * exchanged back.
 *
 * An existing folder of that name is replaced in one step and retired. Where the file system cannot
 * exchange names, two steps are needed; between them readers find it as `folder`.replaced (open.h).
 * A folder that is not a checkpoint (removable.h), or ceased to be one meanwhile, is not replaced:
 * an error. After an error before the rename, `folder` is unchanged. */
SW_MUST_USE sw_status sw_commit(const char *partial, const char *folder, const char *replaces,
                                const sw_manifest *manifest, sw_error *err);

/* Remove what the commit has replaced. */
void sw_commit_clean(const char *partial, const char *folder, const char *nonce);

/* Rename each folder to <name>.<nonce>.trash, make that durable, and unlink, as far as possible.
 * What remains is no checkpoint, and the next writer removes it. What is not removable
 * (removable.h) stays. */
void sw_retire(const char *const *folders, size_t count, const char *nonce);

#endif
