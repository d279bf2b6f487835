/* save_state.c - decide if a save continues: this rank's first failure ends it. */
#include "checkpoint/save_job.h"

void sw_save_record_failure(sw_saver *saver, const sw_error *why)
{
    pthread_mutex_lock(&saver->mutex);
    if (saver->failure.status == SW_OK)
        saver->failure = *why;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
}

sw_status sw_save_check(sw_saver *saver, sw_error *err)
{
    pthread_mutex_lock(&saver->mutex);
    sw_status status = saver->failure.status;
    if (status != SW_OK && err)
        *err = saver->failure;
    pthread_mutex_unlock(&saver->mutex);
    return status;
}
