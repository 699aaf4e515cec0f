import sys, time
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.selftest import SelftestOrder
from megacpp_validate.selftest.crew import run_tasks
from megacpp_validate.selftest.tasks import plan_tasks
if __name__=='__main__':
    c=read_catalog(); t=time.time()
    for module in sys.argv[1:]:
        ms=tuple(m.planned for m in c.mutants if m.module==module)
        killed=0; left=[]; alarms=[]; clean=0
        for run in run_tasks(plan_tasks(SelftestOrder((module,),ms,clean=6,seed=11)),jobs=2,limit_s=180):
            bad=[r for r in run.receipts if str(r.outcome)!='pass']
            if run.mutant:
                if bad and run.planted: killed+=1
                else: left.append((run.mutant,run.reached,run.trouble))
            else:
                clean+=1
                if bad: alarms.append((run.requested,bad[0].reason))
        print(module,f'{killed} of {len(ms)} killed',left,f'alarms {len(alarms)} of {clean}',alarms[:2],round(time.time()-t),flush=True)
