/* A stand-in for TE's torch extension, which loads on a host without CUDA.
 *
 * It is a real extension module: the loader resolves it, Python calls its PyInit function. What its module then
 * holds is made by standin/extension.py, which the build puts in as STANDIN_SOURCE (a C string).
 * Python.h is not needed: the few prototypes and the layout of PyModuleDef, the same in CPython 3.11 to 3.14
 * on 64-bit builds with the global interpreter lock, are declared here.
 */
#include <stddef.h>

typedef struct _object PyObject;

typedef struct {
    ptrdiff_t reference_count;
    void *type;
    PyObject *(*init)(void);
    ptrdiff_t index;
    PyObject *copy;
    const char *name;
    const char *doc;
    ptrdiff_t size;
    void *methods, *slots, *traverse, *clear, *free;
} ModuleDefinition;

extern PyObject *PyModule_Create2(ModuleDefinition *, int);
extern PyObject *PyModule_GetDict(PyObject *);
extern PyObject *PyEval_GetBuiltins(void);
extern int PyDict_SetItemString(PyObject *, const char *, PyObject *);
extern PyObject *PyRun_String(const char *, int, PyObject *, PyObject *);
extern void Py_DecRef(PyObject *);

#include "standin_source.h"

enum { PYTHON_API_VERSION = 1013, PY_FILE_INPUT = 257 };

static ModuleDefinition definition = {
    .reference_count = 1,
    .name = "transformer_engine_torch",
    .doc = "Stand-in for the torch extension of Transformer Engine: it computes nothing.",
    .size = -1,
};

/* The core library defines it and is loaded first; TE's real extension leans on the core in the same way. */
extern int nvte_stand_in_is_loaded(void);

PyObject *PyInit_transformer_engine_torch(void) {
    PyObject *module = nvte_stand_in_is_loaded() ? PyModule_Create2(&definition, PYTHON_API_VERSION) : NULL;
    if (module == NULL)
        return NULL;
    PyObject *names = PyModule_GetDict(module);
    if (PyDict_SetItemString(names, "__builtins__", PyEval_GetBuiltins()) < 0)
        return NULL;
    PyObject *result = PyRun_String(STANDIN_SOURCE, PY_FILE_INPUT, names, names);
    if (result == NULL) {
        Py_DecRef(module);
        return NULL;
    }
    Py_DecRef(result);
    return module;
}
