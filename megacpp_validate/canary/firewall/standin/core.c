/* Stand-ins for the shared libraries around TE's Python sources; each part is chosen by a macro.
 *
 * PART_CORE    the core library: what the Python sources and the extension's stand-in ask of it
 * PART_CUBLAS  a library that the core needs
 * PART_EMPTY   a library that is only looked for and loaded
 * PART_HANGING a core whose loading waits for ever, as one that waits for a device or a lock
 * PART_ABORTING a core whose loading ends the process, as one built for another processor
 */

#if defined(PART_CORE)

int cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return 0;
}
int nvte_stand_in_is_loaded(void) { return 1; }

#elif defined(PART_HANGING)

extern int pause(void);
__attribute__((constructor)) static void hang(void) {
    for (;;)
        pause();
}

#elif defined(PART_ABORTING)

extern void abort(void);
__attribute__((constructor)) static void die(void) { abort(); }

#else

int stand_in_is_loaded(void) { return 1; }

#endif
