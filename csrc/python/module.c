/* module.c - the one extension module: multi-phase initialisation, all state in the module. */
#include "python/engine.h"

static const struct {
    PyType_Spec *spec;
    size_t place; /* in engine_state */
} types[] = {
    {&sw_py_arena_type_spec, offsetof(engine_state, arena_type)},
    {&sw_py_comm_type_spec, offsetof(engine_state, comm_type)},
    {&sw_py_reducer_type_spec, offsetof(engine_state, reducer_type)},
    {&sw_py_hook_type_spec, offsetof(engine_state, hook_type)},
    {&sw_py_store_type_spec, offsetof(engine_state, store_type)},
    {&sw_py_state_file_type_spec, offsetof(engine_state, state_file_type)},
    {&sw_py_checkpoint_plan_type_spec, offsetof(engine_state, plan_type)},
    {&sw_py_checkpoint_saver_type_spec, offsetof(engine_state, saver_type)},
    {&sw_py_checkpoint_folder_type_spec, offsetof(engine_state, folder_type)},
    {&sw_py_device_comm_type_spec, offsetof(engine_state, device_comm_type)},
    {&sw_py_device_units_type_spec, offsetof(engine_state, device_units_type)},
    {&sw_py_device_offload_type_spec, offsetof(engine_state, device_offload_type)},
    {&sw_py_device_home_type_spec, offsetof(engine_state, device_home_type)},
    {&sw_py_device_stage_type_spec, offsetof(engine_state, device_stage_type)},
    {&sw_py_codec_type_spec, offsetof(engine_state, codec_type)},
    {&sw_py_exchange_type_spec, offsetof(engine_state, exchange_type)},
};

static PyMethodDef *const functions[] = {sw_py_optim_functions,  sw_py_compress_functions,
                                         sw_py_device_functions, sw_py_device_compress_functions,
                                         sw_py_fork_functions,   sw_py_marks_functions,
                                         sw_py_account_functions};

static PyObject **type_place(engine_state *state, size_t i)
{
    return (PyObject **)(void *)((char *)state + types[i].place);
}

static int module_exec(PyObject *module)
{
    engine_state *state = PyModule_GetState(module);
    int failed = sw_py_errors_init(module, state);
    for (size_t i = 0; !failed && i < sizeof types / sizeof *types; ++i) {
        PyObject *type = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        *type_place(state, i) = type;
        failed = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    }
    for (size_t i = 0; !failed && i < sizeof functions / sizeof *functions; ++i)
        failed = PyModule_AddFunctions(module, functions[i]);
    return failed;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    engine_state *state = PyModule_GetState(module);
    Py_VISIT(state->error);
    Py_VISIT(state->comm_error);
    Py_VISIT(state->comm_timeout_error);
    Py_VISIT(state->checkpoint_error);
    Py_VISIT(state->newer_checkpoint_error);
    Py_VISIT(state->on_step);
    for (size_t i = 0; i < sizeof types / sizeof *types; ++i)
        Py_VISIT(*type_place(state, i));
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED /* objects rely on the GIL: importing the engine turns it on */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine",
    .m_doc = "Shardwright's engine.",
    .m_size = sizeof(engine_state),
    .m_methods = sw_py_kernel_functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
};

PyMODINIT_FUNC PyInit__engine(void)
{
    return PyModuleDef_Init(&module_definition);
}
