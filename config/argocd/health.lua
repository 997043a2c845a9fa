-- Health of a FlashSale for Argo CD: put it into argocd-cm under
-- resource.customizations.health.sales.flashsale.dev_FlashSale (see docs/gitops.md).
local health = { status = "Progressing", message = "Waiting for the operator" }

if obj.status == nil or obj.status.conditions == nil then
  return health
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  health.message = "Waiting for the operator to see the last change"
  return health
end
if obj.metadata.deletionTimestamp ~= nil then
  health.message = obj.status.message
  return health
end

for _, condition in ipairs(obj.status.conditions) do
  if condition.type == "Stalled" and condition.status == "True" then
    return { status = "Degraded", message = condition.reason .. ": " .. condition.message }
  end
end
for _, condition in ipairs(obj.status.conditions) do
  if condition.type == "Ready" then
    health.message = condition.reason .. ": " .. condition.message
    if condition.status == "True" then
      health.status = "Healthy"
      if obj.status.phase == "Suspended" then
        health.status = "Suspended"
      end
    end
  end
end
return health
