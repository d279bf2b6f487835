/* module.c - the one extension module: multi-phase initialisation, all state in the module. */
#include "python/engine.h"

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int module_exec(PyObject *module)
{
    engine_state *state = PyModule_GetState(module);
    if (sw_py_errors_init(module, state) < 0 ||
        add_type(module, &sw_py_arena_type_spec, &state->arena_type) < 0 ||
        add_type(module, &sw_py_comm_type_spec, &state->comm_type) < 0 ||
        add_type(module, &sw_py_reducer_type_spec, &state->reducer_type) < 0 ||
        add_type(module, &sw_py_hook_type_spec, &state->hook_type) < 0 ||
        add_type(module, &sw_py_units_type_spec, &state->units_type) < 0 ||
        add_type(module, &sw_py_state_file_type_spec, &state->state_file_type) < 0 ||
        add_type(module, &sw_py_checkpoint_plan_type_spec, &state->plan_type) < 0 ||
        add_type(module, &sw_py_checkpoint_saver_type_spec, &state->saver_type) < 0 ||
        add_type(module, &sw_py_checkpoint_folder_type_spec, &state->folder_type) < 0 ||
        add_type(module, &sw_py_device_comm_type_spec, &state->device_comm_type) < 0 ||
        add_type(module, &sw_py_device_units_type_spec, &state->device_units_type) < 0 ||
        add_type(module, &sw_py_device_offload_type_spec, &state->device_offload_type) < 0 ||
        add_type(module, &sw_py_device_stage_type_spec, &state->device_stage_type) < 0 ||
        add_type(module, &sw_py_device_region_type_spec, &state->device_region_type) < 0 ||
        sw_py_optim_functions_add(module) < 0 || sw_py_compress_functions_add(module) < 0 ||
        sw_py_device_functions_add(module) < 0 || sw_py_device_codec_functions_add(module) < 0 ||
        sw_py_device_powersgd_functions_add(module) < 0 ||
        sw_py_device_check_functions_add(module) < 0 || sw_py_fork_functions_add(module) < 0 ||
        sw_py_marks_functions_add(module) < 0)
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    engine_state *state = PyModule_GetState(module);
    Py_VISIT(state->error);
    Py_VISIT(state->comm_error);
    Py_VISIT(state->comm_timeout_error);
    Py_VISIT(state->checkpoint_error);
    Py_VISIT(state->newer_checkpoint_error);
    Py_VISIT(state->arena_type);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->reducer_type);
    Py_VISIT(state->hook_type);
    Py_VISIT(state->units_type);
    Py_VISIT(state->state_file_type);
    Py_VISIT(state->device_comm_type);
    Py_VISIT(state->device_units_type);
    Py_VISIT(state->device_offload_type);
    Py_VISIT(state->device_stage_type);
    Py_VISIT(state->device_region_type);
    Py_VISIT(state->plan_type);
    Py_VISIT(state->saver_type);
    Py_VISIT(state->folder_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
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
